"""``spec.trainer``: the program that trains."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, DnsSubdomain, Rule
from dljob.api.spec.pods import map_list


class Framework(StrEnum):
    """How ranks of the user's own program learn of each other."""

    DLTRAIN = "DLTrain"
    TORCHRUN = "Torchrun"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class EnvVar(ApiModel):
    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256, description="Its name.")]
    value: Annotated[str, Field(max_length=32768, description="Its value, as it is: nothing is expanded.")] = ""


class Trainer(ApiModel):
    """The program that trains. By default the built-in one, in the operator's trainer image."""

    rules = (
        Rule(
            "args",
            "!has(self.args) || size(self.args) == 0 || (has(self.command) && size(self.command) > 0)",
            "args needs command: set command to your program",
            lambda t: not t.args or bool(t.command),
        ),
    )

    image: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=1024,
            description="Image of the pods; default: the operator's trainer image.",
        ),
    ] = None
    image_pull_policy: Annotated[
        PullPolicy | None, Field(description="When the image is pulled; default: as the operator is set, IfNotPresent.")
    ] = None
    image_pull_secrets: Annotated[
        tuple[DnsSubdomain, ...],
        Field(max_length=16, description="Names of Secrets with registry credentials."),
    ] = ()
    command: Annotated[
        tuple[str, ...],
        Field(
            max_length=64,
            description="Your training program, run once per rank; default: the built-in trainer.",
        ),
    ] = ()
    args: Annotated[tuple[str, ...], Field(max_length=256, description="Arguments of command.")] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Field(max_length=256, description="Environment of every rank.", json_schema_extra=map_list("name")),
    ] = ()
    framework: Annotated[
        Framework,
        Field(
            description="How command's ranks find each other: DLTrain (MPI, the dltrain API) or Torchrun "
            "(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, for unmodified scripts)."
        ),
    ] = Framework.DLTRAIN
