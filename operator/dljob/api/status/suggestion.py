"""The choice that dljob made for the data of a job with ``spec.task``."""

from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel

_Name = Annotated[str, Field(max_length=100)]
_Line = Annotated[str, Field(max_length=400)]


class SuggestedAlternative(ApiModel):
    model: _Name
    parameters: Annotated[int, Field(ge=1)]
    why: _Line


class SuggestionStatus(ApiModel):
    """The suggestion for the data of a job with a task."""

    model: Annotated[_Name, Field(description="The recommended model, which the job trains.")]
    why: Annotated[_Line, Field(description="Why it is recommended.")]
    parameters: Annotated[int, Field(ge=1, description="Number of the model's trainable parameters.")]
    alternatives: Annotated[
        tuple[SuggestedAlternative, ...], Field(max_length=4, description="Models that may suit the data too.")
    ] = ()
    data: Annotated[tuple[_Line, ...], Field(max_length=8, description="What the data holds.")] = ()
    findings: Annotated[
        tuple[_Line, ...],
        Field(max_length=20, description="What is unusual about the data, and what was done about it."),
    ] = ()
    config_map: Annotated[str, Field(max_length=253, description="ConfigMap with the scripts that the job runs.")]
