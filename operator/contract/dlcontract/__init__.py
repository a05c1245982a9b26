"""The contract between the operator and the trainer, as JSON with a schema number.

``Plan`` goes from the operator to the agents (ConfigMap ``<job>-plan``, key ``plan.json``); ``Report`` comes
back (ConfigMap ``<job>-report``, key ``report.json``). Reports cross a trust boundary: parse them with
``Report.parse``, which refuses whatever does not fit. Both sides import their shared names from here.
"""

from dlcontract.collectives import MEASURABLE, CollectiveName
from dlcontract.plan import CheckpointRef, DatasetRef, Expectation, ModelRef, OptimizerRef, Plan, Rank, Role
from dlcontract.pods import (
    AGENT_PORT,
    CHECKPOINT_DIR,
    CPUS_VARIABLE,
    DATASET_DIR,
    DATASET_SUMS,
    DATASET_VARIABLE,
    EXIT_BAD_INPUT,
    METRICS_PORT,
    MPI_PORTS,
    PLAN_KEY,
    REPORT_KEY,
    TLS_DIR,
    config_map_names,
)
from dlcontract.record import SCHEMA, Record, Told, schema_of
from dlcontract.report import (
    MAX_LOG_TAIL,
    MOST_NOISE,
    CheckpointMark,
    Failure,
    Mismatch,
    Noise,
    Outcome,
    ProbePoint,
    RankMeasure,
    Report,
    RunPhase,
    StartupMarks,
)

__all__ = [
    "AGENT_PORT",
    "CHECKPOINT_DIR",
    "CPUS_VARIABLE",
    "DATASET_DIR",
    "DATASET_SUMS",
    "DATASET_VARIABLE",
    "EXIT_BAD_INPUT",
    "MAX_LOG_TAIL",
    "MEASURABLE",
    "METRICS_PORT",
    "MOST_NOISE",
    "MPI_PORTS",
    "PLAN_KEY",
    "REPORT_KEY",
    "SCHEMA",
    "TLS_DIR",
    "CheckpointMark",
    "CheckpointRef",
    "CollectiveName",
    "DatasetRef",
    "Expectation",
    "Failure",
    "Mismatch",
    "ModelRef",
    "Noise",
    "OptimizerRef",
    "Outcome",
    "Plan",
    "ProbePoint",
    "Rank",
    "RankMeasure",
    "Record",
    "Report",
    "Role",
    "RunPhase",
    "StartupMarks",
    "Told",
    "config_map_names",
    "schema_of",
]
