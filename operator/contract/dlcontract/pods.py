"""What the operator and the processes in a trainer pod both name: ConfigMaps, ports, paths, variables, exit codes."""

PLAN_KEY = "plan.json"
REPORT_KEY = "report.json"

AGENT_PORT = 7470
"""mTLS, between the agents of one job."""
MPI_PORTS = (7500, 7599)
"""First and last TCP port of Open MPI and its daemons; plaintext, the job's pods only."""
METRICS_PORT = 9470
"""Plain HTTP, read-only: /metrics, /healthz and /readyz."""

TLS_DIR = "/etc/dljob/tls"
"""Where the per-job Secret is mounted: ca.crt, tls.crt, tls.key."""
CHECKPOINT_DIR = "/var/lib/dljob/checkpoints"
"""Where the checkpoint volume is mounted."""
DATASET_DIR = "/var/lib/dljob/dataset"
"""Where a pvc:// dataset's claim is mounted, read-only, and where fetched data is."""

JOB_VARIABLE = "DLJOB_NAME"
NAMESPACE_VARIABLE = "DLJOB_NAMESPACE"
UID_VARIABLE = "DLJOB_UID"
SERVICE_VARIABLE = "DLJOB_SERVICE"
CLUSTER_DOMAIN_VARIABLE = "DLJOB_CLUSTER_DOMAIN"
POD_VARIABLE = "DLJOB_POD"
POD_IP_VARIABLE = "DLJOB_POD_IP"
"""Environment of a trainer pod: the job, its headless Service, the cluster's DNS domain, and the pod itself."""
CPUS_VARIABLE = "DLTRAIN_CPUS_M"
"""Environment of a trainer pod: CPUs it requested, in thousandths."""
DATASET_SUMS = "SHA256SUMS"
"""Name of a file of checksums, as sha256sum writes it; a dataset's URI that ends in it means all files it lists."""
DATASET_VARIABLE = "DLJOB_DATASET"
"""Environment of a trainer pod: path of the data behind ``spec.dataset.uri``."""

EXIT_BAD_INPUT = 64
"""Exit code of ranks and of the dataset's init container: the job as written cannot succeed."""


def config_map_names(job: str) -> tuple[str, str]:
    """Names of a job's plan and report ConfigMaps."""
    return f"{job}-plan", f"{job}-report"
