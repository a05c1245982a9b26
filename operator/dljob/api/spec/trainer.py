"""``spec.trainer``: image, command and environment of the ranks."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import AUTO_SIZE, ApiModel, AutoBytes, DnsSubdomain, Rule
from dljob.api.spec.environment import EnvFrom, EnvVar
from dljob.api.spec.pods import each_once, map_list
from dljob.api.spec.source import Source


class Framework(StrEnum):
    """How the ranks of a training script find each other: through dltrain, torchrun's variables, or MPI."""

    DLTRAIN = "DLTrain"
    TORCHRUN = "Torchrun"
    MPI = "MPI"


class AgentSource(StrEnum):
    """Origin of a pod's agent, which starts and watches the ranks."""

    AUTO = "Auto"
    INJECTED = "Injected"
    FROM_IMAGE = "FromImage"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


Argument = Annotated[str, Field(max_length=32768)]


class Scratch(ApiModel):
    rules = (
        Rule(
            "size",
            "type(self.size) == int || self.size == 'Auto' || self.size.matches('[1-9]')",
            "size must be more than 0: set Auto or a size such as 20Gi, or remove scratch",
            lambda s: s.size == AUTO_SIZE or any(digit in s.size for digit in "123456789"),
        ),
    )

    size: Annotated[
        AutoBytes,
        Field(
            description="Space on each node, such as 20Gi. Auto: 2Gi, plus twice the size of the model's parameters, "
            "plus the size of the dataset if dataset.sampleBytes is set."
        ),
    ]


class Trainer(ApiModel):
    """Image, command and environment of the ranks. Default: the built-in trainer in the operator's trainer image."""

    rules = (
        Rule(
            "args",
            "!has(self.args) || size(self.args) == 0 || (has(self.command) && size(self.command) > 0)",
            "args needs command: set command to your training script",
            lambda t: not t.args or bool(t.command),
        ),
        Rule(
            "source",
            "!has(self.source) || (has(self.command) && size(self.command) > 0)",
            "source needs command: set command to a script among the files of source, such as [python, train.py]",
            lambda t: t.source is None or bool(t.command),
        ),
        Rule(
            "agent",
            "!has(self.agent) || self.agent != 'Injected' || has(self.framework) && self.framework != 'DLTrain'",
            "agent Injected needs framework Torchrun or MPI, because ranks with framework DLTrain use the trainer in "
            "their image: choose one of them, or build the image FROM the trainer image and remove agent",
            lambda t: t.agent is not AgentSource.INJECTED or t.framework is not Framework.DLTRAIN,
        ),
        Rule(
            "elastic",
            "!has(self.elastic) || !self.elastic || has(self.framework) && self.framework == 'Torchrun'",
            "elastic needs framework Torchrun: choose it, or remove elastic. Jobs of dltrain are elastic by nodes.min",
            lambda t: not t.elastic or t.framework is Framework.TORCHRUN,
        ),
    )

    image: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=1024,
            description="Image of the pods. Default: the operator's trainer image.",
        ),
    ] = None
    image_pull_policy: Annotated[
        PullPolicy | None,
        Field(
            description="When the image is pulled. Default: the operator's setting, which is IfNotPresent unless "
            "changed."
        ),
    ] = None
    image_pull_secrets: Annotated[
        tuple[DnsSubdomain, ...],
        Field(
            max_length=16,
            description="Names of Secrets with registry credentials, such as [registry] in place of [{name: registry}] "
            "in a pod spec.",
        ),
    ] = ()
    command: Annotated[
        tuple[Argument, ...],
        Field(
            max_length=64,
            description="Command of your training script, started once per rank. If it begins with torchrun, python "
            "-m torch.distributed.run, accelerate launch, mpirun, mpiexec or horovodrun, the ranks run its script, and "
            "the plan takes precedence over options about nodes and processes. Default: the built-in trainer.",
        ),
    ] = ()
    args: Annotated[tuple[Argument, ...], Field(max_length=256, description="Arguments of command.")] = ()
    source: Annotated[
        Source | None,
        Field(
            description="Where the files of the training script come from: a ConfigMap, a git repository or an "
            "archive. An init container fetches them before training, for any image. They are read-only, in the "
            "working directory of command. Default: they are in the image."
        ),
    ] = None
    env: Annotated[
        tuple[EnvVar, ...],
        Field(max_length=256, description="Environment variables of every rank.", json_schema_extra=map_list("name")),
        each_once("name"),
    ] = ()
    scratch: Annotated[
        Scratch | None,
        Field(
            description="Space for temporary files, downloads and caches of each pod: HOME, TMPDIR, HF_HOME, "
            "TORCH_HOME and XDG_CACHE_HOME. It is requested as ephemeral storage. Default: 2Gi, without a request."
        ),
    ] = None
    env_from: Annotated[
        tuple[EnvFrom, ...],
        Field(
            max_length=32,
            description="Secrets and ConfigMaps whose keys become environment variables of every rank. Variables in "
            "env take precedence.",
        ),
    ] = ()
    framework: Annotated[
        Framework,
        Field(
            description="How the ranks of command find each other. DLTrain: through MPI and the dltrain API. Torchrun: "
            "through RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, so that scripts for torchrun run "
            "unmodified. MPI: through the variables of mpirun, so that programs with mpi4py, Horovod or another "
            "library over MPI run unmodified."
        ),
    ] = Framework.DLTRAIN
    agent: Annotated[
        AgentSource | None,
        Field(
            description="Where the agent, which starts and watches the ranks in each pod, comes from. FromImage: from "
            "the image, which must be built FROM the trainer image. Injected: an init container copies the agent with "
            "its own Python and C library into the pod, so that image may be any image; needs framework Torchrun or "
            "MPI. Auto: with these frameworks and an image, as Injected, unless the image has an agent at "
            "/opt/dljob/bin/dljob-agent; otherwise FromImage. Default: Auto."
        ),
    ] = None

    elastic: Annotated[
        bool | None,
        Field(
            description="True: the script for torchrun can resume on another number of nodes, between nodes.min and "
            "nodes.max. It then starts on as many of them as are free, and goes on with fewer if a pod is lost. Set "
            "nodes.max, and keep checkpoints enabled. Default: false."
        ),
    ] = None

    @property
    def agent_source(self) -> AgentSource:
        """Return the source of the agent. AUTO: the image if it is built FROM the trainer image, else injected."""
        agent = self.agent or AgentSource.AUTO
        if agent is AgentSource.AUTO and (self.image is None or self.framework is Framework.DLTRAIN):
            return AgentSource.FROM_IMAGE
        return agent

    @property
    def threads(self) -> int | None:
        """Return the number of threads that OMP_NUM_THREADS in ``env`` sets for each rank; None if it sets none.

        In a list, such as 4,2, the first number counts, as for ``dltrain.host.cgroup``.
        """
        asked = (item.value or "" for item in self.env if item.name == "OMP_NUM_THREADS")
        number = next(asked, "").partition(",")[0].strip()
        return int(number) or None if number.isdecimal() else None
