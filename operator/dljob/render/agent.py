"""The injected agent in the pod: its volume, the init container that fills the volume, and the command."""

from collections.abc import Sequence

from dlcontract import AGENT_DIR, AGENT_SOURCE_DIR, IMAGE_AGENT
from dljob.api import DLJobSpec
from dljob.api.spec.trainer import AgentSource
from dljob.render.config import Manifest, RenderConfig

CONTAINER = "dljob-agent"
"""Name of the init container and the volume. Others, such as a monitoring sidecar, are called ``agent`` already."""
SIZE = "256Mi"
"""Size limit of the volume. The agent's files take about 80 MB."""
_COMMAND_FROM_IMAGE = ("dljob-agent",)


def injected(spec: DLJobSpec) -> bool:
    """Return True if the pods of the job get a copy of the agent, in addition to what is in their image."""
    return spec.trainer.agent_source is not AgentSource.FROM_IMAGE


def volume(spec: DLJobSpec) -> list[Manifest]:
    return [{"name": CONTAINER, "emptyDir": {"sizeLimit": SIZE}}] if injected(spec) else []


def mount(spec: DLJobSpec) -> list[Manifest]:
    return [{"name": CONTAINER, "mountPath": AGENT_DIR, "readOnly": True}] if injected(spec) else []


def command(spec: DLJobSpec) -> list[str] | None:
    """Return the command of the trainer container; None: the one of the operator's trainer image."""
    if not injected(spec):
        # A custom image is built FROM the trainer image, but may have any entry point.
        return list(_COMMAND_FROM_IMAGE) if spec.trainer.image else None
    preferred: Sequence[str] = ("--prefer", IMAGE_AGENT) if spec.trainer.agent_source is AgentSource.AUTO else ()
    return [f"{AGENT_DIR}/bin/agent", *preferred]


def init_container(config: RenderConfig, security: Manifest) -> Manifest:
    """Return the init container that copies the agent from the trainer image. ``security``: its ``securityContext``."""
    return {
        "name": CONTAINER,
        **trainer_image(config),
        "command": [f"{AGENT_SOURCE_DIR}/bin/python", "-I", "-m", "dltrain.launch.injected", AGENT_DIR],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": security,
        "volumeMounts": [{"name": CONTAINER, "mountPath": AGENT_DIR}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def trainer_image(config: RenderConfig) -> Manifest:
    """Return the fields ``image`` and ``imagePullPolicy`` of a container with the operator's trainer image."""
    return {"image": config.trainer_image, "imagePullPolicy": config.image_pull_policy}
