"""The NetworkPolicy of a job's pods, for incoming traffic only.

Cluster administrators decide about outgoing traffic. If the default policy prevented a training script from loading
its data, users would disable the policy.
"""

from dlcontract import AGENT_PORT, METRICS_PORT, MPI_PORTS
from dljob.api import DLJobSpec, Framework
from dljob.job.observed import JOB_LABEL, JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest, RenderConfig
from dljob.render.names import Names, metadata


def network_policy(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> Manifest:
    """Return the NetworkPolicy of a job's pods.

    The job's own pods may connect to the agent and MPI ports. The sources in ``config.metrics_peers`` may connect to
    the metrics port; if it is empty, any source may. All other incoming traffic is forbidden.

    If a job uses ``torch.distributed``, the job's pods may also connect to each other on every TCP port, because
    ``torch.distributed`` listens on ports that the kernel chooses. Jobs on GPUs always use it, whatever the plan's
    collective. The same holds for Torchrun scripts and MPI programs, which may open ports of their own.
    """
    torch = accepted.plan.collective in ("Torch", "DDP") or spec.trainer.framework is not Framework.DLTRAIN
    torch = torch or any(group.is_gpu for group in accepted.groups)
    peers = [{"podSelector": {"matchLabels": {JOB_LABEL: job.name}}}]
    if torch:
        peer_ports: list[Manifest] = [{"protocol": "TCP"}]
    else:
        first, last = MPI_PORTS
        peer_ports = [{"protocol": "TCP", "port": AGENT_PORT}, {"protocol": "TCP", "port": first, "endPort": last}]
    metrics: Manifest = {"ports": [{"protocol": "TCP", "port": METRICS_PORT}]}
    if config.metrics_peers:
        metrics["from"] = [dict(peer) for peer in config.metrics_peers]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, Names.of(job).service),
        "spec": {
            "podSelector": {"matchLabels": {JOB_LABEL: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": peers, "ports": peer_ports}, metrics],
        },
    }
