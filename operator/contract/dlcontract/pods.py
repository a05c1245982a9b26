"""Names that the operator and trainer pods share: ConfigMaps, ports, paths, variables, exit codes, device types."""

import re
from typing import NamedTuple

PLAN_KEY = "plan.json"
REPORT_KEY = "report.json"
FAILURES_KEY = "failures.json"
"""Key of the ``FailureAllowance`` in the ConfigMap ``<job>-plan``. The ConfigMaps of most jobs lack this key.

The two constants before it are the keys of the plan in this ConfigMap, and of the report in ``<job>-report``.
"""

AGENT_PORT = 7470
"""TCP port on which the agents of one job connect with mTLS. Each trainer pod has an agent, which starts its ranks."""
MPI_PORTS = (7500, 7599)
"""First and last TCP port that Open MPI and its daemons use, unencrypted. Only the job's own pods may connect."""
METRICS_PORT = 9470
"""TCP port on which a trainer pod serves /metrics, /healthz and /readyz (HTTP, read-only)."""

TLS_DIR = "/etc/dljob/tls"
"""Mount path of the job's Secret, which contains the files ca.crt, tls.crt and tls.key."""
CHECKPOINT_DIR = "/var/lib/dljob/checkpoints"
"""Mount path of the checkpoint volume, or with ``spec.checkpoint.uri`` of a volume on the node's disk."""
CHECKPOINT_SECRET_DIR = "/var/lib/dljob/checkpoint-secret"
"""Mount path of the Secret with the credentials for ``spec.checkpoint.uri``: one file for each key."""
DATASET_DIR = "/var/lib/dljob/dataset"
DATASET_SECRET_DIR = "/var/lib/dljob/dataset-secret"
"""Folder with the credentials for shards of the dataset: one file per key of ``spec.dataset.secretName``."""
"""Mount path of the training data: the read-only volume of a pvc:// dataset, or the volume with fetched data."""

AGENT_DIR = "/var/lib/dljob/agent"
"""Mount path of the volume with the injected agent, in pods whose image does not have the agent."""
AGENT_SOURCE_DIR = "/opt/dljob-agent"
"""Folder in the trainer image with the files of the injected agent."""
IMAGE_AGENT = "/opt/dljob/bin/dljob-agent"
"""Path of the agent in the trainer image and in images that are built FROM it."""

SOURCE_DIR = "/var/lib/dljob/source"
"""Mount path of the volume for the files of ``spec.trainer.source``."""
SOURCE_FILES_DIR = f"{SOURCE_DIR}/files"
"""Folder with these files. It, or the folder ``path`` in it, is the working directory of the trainer container."""
SOURCE_INPUT_DIR = "/var/lib/dljob/source-input"
"""Mount path of the ConfigMap, or of the claim with the archive, in the init container that fills ``SOURCE_DIR``."""

JOB_VARIABLE = "DLJOB_NAME"
NAMESPACE_VARIABLE = "DLJOB_NAMESPACE"
UID_VARIABLE = "DLJOB_UID"
SERVICE_VARIABLE = "DLJOB_SERVICE"
CLUSTER_DOMAIN_VARIABLE = "DLJOB_CLUSTER_DOMAIN"
POD_VARIABLE = "DLJOB_POD"
POD_IP_VARIABLE = "DLJOB_POD_IP"
"""Name of the environment variable with a trainer pod's own IP address.

The six constants before it name the variables with the job's name, namespace and UID, the name of its headless Service,
the cluster's DNS domain, and the pod's name.
"""
CPUS_VARIABLE = "DLTRAIN_CPUS_M"
"""Name of the environment variable with a trainer pod's CPU request, in thousandths of a CPU."""
DATASET_SUMS = "SHA256SUMS"
"""Name of a checksum file in the format of sha256sum.

A dataset URI that ends in this name stands for all files that this checksum file lists.
"""
DATASET_VARIABLE = "DLJOB_DATASET"
"""Name of the environment variable with the path at which a trainer pod finds the data of ``spec.dataset.uri``."""

LOCAL_BATCH_VARIABLE = "DLJOB_LOCAL_BATCH_SIZE"
GLOBAL_BATCH_VARIABLE = "DLJOB_GLOBAL_BATCH_SIZE"
CHECKPOINT_VARIABLE = "DLJOB_CHECKPOINT_DIR"
"""Name of the environment variable with the folder for the checkpoints of a script for torchrun or an MPI program.

The two constants before it name the variables with the samples per step of the rank and of the whole job. These two
variables are not set if the script chooses its own batch size.
"""

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "DLTRAIN_PLAN", "DLTRAIN_SOCKET", "DLTRAIN_MEMORY",
)  # fmt: skip
"""Names of the environment variables that an agent sets for every rank, whatever the job sets."""
TORCHELASTIC_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
"""Names of the variables that an agent also sets for the ranks of a script for torchrun."""
MPI_NETWORK_VARIABLES = (
    "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_port_min_v4", "OMPI_MCA_btl_tcp_port_range_v4",
    "OMPI_MCA_btl_tcp_port_min_v6", "OMPI_MCA_btl_tcp_port_range_v6",
)  # fmt: skip
"""Names of the variables that an agent also sets for the ranks that MPI starts."""
RUN_DIR_VARIABLE = "DLTRAIN_RUN_DIR"
"""Name of the environment variable with the folder for an agent's sockets and temporary files (default: in TMPDIR)."""

EXIT_BAD_INPUT = 64
"""Exit code that reports invalid input, so that the job fails without a retry.

A rank, or the init container that fetches the dataset, ends with this code if the job cannot succeed with its present
spec.
"""


def config_map_names(job: str) -> tuple[str, str, str]:
    """Return the names of three ConfigMaps of ``job``: those with its plan, its report, and its ranks' last output."""
    return f"{job}-plan", f"{job}-report", f"{job}-logs"


class DeviceLimits(NamedTuple):
    """A device type, taken apart: the product of the GPUs and the limits under which they run."""

    product: str
    power_limit_W: int | None = None
    """Power limit in watts; None if the type has none."""
    clock_limit_MHz: int | None = None
    """Highest clock in MHz; None if the type has none."""


_LIMITED = re.compile(r"(.+?)(?:@([1-9][0-9]*)MHz)?(?:@([1-9][0-9]*)W)?")


def with_limits(product: str, power_limit_W: int | None = None, clock_limit_MHz: int | None = None) -> str:
    """Return the device type of GPUs that run under a power limit in watts, a clock limit in MHz, or both.

    Examples: ``NVIDIA-L40S@250W``, ``NVIDIA-L40S@1200MHz``, ``NVIDIA-L40S@1200MHz@250W``. Labels of nodes cannot
    contain ``@``, so no product has such a name.
    """
    clock = "" if clock_limit_MHz is None else f"@{clock_limit_MHz}MHz"
    return product + clock + ("" if power_limit_W is None else f"@{power_limit_W}W")


def without_limits(device: str) -> DeviceLimits:
    """Split a device type into its product and its limits. Limits that the type lacks are None."""
    found = _LIMITED.fullmatch(device)
    if found is None:
        return DeviceLimits(device)
    product, clock, power = found.groups()
    return DeviceLimits(product, int(power) if power else None, int(clock) if clock else None)
