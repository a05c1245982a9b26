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


class BaselineScoreStatus(ApiModel):
    """Scores of a model of the baseline, in the measure of the baseline."""

    model: Annotated[str, Field(max_length=64)]
    validation: Annotated[float, Field(description="Mean score on held-out folds of the training part.")]
    error: Annotated[float, Field(ge=0, description="Standard error of the mean.")]
    test: Annotated[float | None, Field(description="Score on the test part. Unset if undefined.")] = None


class BaselineStatus(ApiModel):
    """What models without deep learning reach on the data, or the reason why that is unknown."""

    measure: Annotated[
        str | None,
        Field(
            max_length=32,
            description="Measure of the scores: accuracy, balanced_accuracy, r2, or bits_per_byte, of which less is "
            "better.",
        ),
    ] = None
    scores: Annotated[
        tuple[BaselineScoreStatus, ...] | None, Field(max_length=4, description="Scores of the models.")
    ] = None
    seconds: Annotated[float, Field(ge=0, description="Time that the baseline took. task.within includes it.")] = 0.0
    problem: Annotated[
        _Line | None, Field(description="Why there are no scores, such as a limit of time or memory.")
    ] = None


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
    baseline: Annotated[
        BaselineStatus | None,
        Field(
            description="Models without deep learning, such as a linear model and trees, which the pod that looks at "
            "the data judges. They choose the recommended model for a table."
        ),
    ] = None
    config_map: Annotated[str, Field(max_length=253, description="ConfigMap with the scripts that the job runs.")]
