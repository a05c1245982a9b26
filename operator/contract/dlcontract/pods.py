"""Names that the operator and trainer pods share: ConfigMaps, ports, paths, environment variables, exit codes."""

PLAN_KEY = "plan.json"
REPORT_KEY = "report.json"

AGENT_PORT = 7470
"""TCP port for mTLS between the agents of one job."""
MPI_PORTS = (7500, 7599)
"""First and last TCP port of Open MPI and its daemons: unencrypted, open to the job's pods only."""
METRICS_PORT = 9470
"""TCP port for HTTP, read-only: /metrics, /healthz and /readyz."""

TLS_DIR = "/etc/dljob/tls"
"""Mount path of the job's Secret: ca.crt, tls.crt, tls.key."""
CHECKPOINT_DIR = "/var/lib/dljob/checkpoints"
"""Mount path of the checkpoint volume."""
DATASET_DIR = "/var/lib/dljob/dataset"
"""Mount path of the claim of a pvc:// dataset (read-only), and the folder of fetched data."""

JOB_VARIABLE = "DLJOB_NAME"
NAMESPACE_VARIABLE = "DLJOB_NAMESPACE"
UID_VARIABLE = "DLJOB_UID"
SERVICE_VARIABLE = "DLJOB_SERVICE"
CLUSTER_DOMAIN_VARIABLE = "DLJOB_CLUSTER_DOMAIN"
POD_VARIABLE = "DLJOB_POD"
POD_IP_VARIABLE = "DLJOB_POD_IP"
"""Environment of a trainer pod: the job, its headless Service, the cluster's DNS domain, and the pod itself."""
CPUS_VARIABLE = "DLTRAIN_CPUS_M"
"""Environment of a trainer pod: its CPU request in thousandths."""
DATASET_SUMS = "SHA256SUMS"
"""Name of a checksum file in the format of sha256sum. A dataset URI that ends in it stands for all listed files."""
DATASET_VARIABLE = "DLJOB_DATASET"
"""Environment of a trainer pod: path of the data of ``spec.dataset.uri``."""

EXIT_BAD_INPUT = 64
"""Exit code of ranks and of the dataset's init container if the spec cannot succeed."""


def config_map_names(job: str) -> tuple[str, str]:
    """Return the names of a job's ConfigMaps for plan and report."""
    return f"{job}-plan", f"{job}-report"
