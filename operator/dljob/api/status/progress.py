"""The progress, measurements and result of a training, as the status of its job shows them."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel


class Measured(ApiModel):
    """Measurements of the run, and the error of the prediction."""

    step_seconds: Annotated[float, Field(ge=0, description="Mean step time over the most recent steps.")]
    samples_per_second: Annotated[float, Field(ge=0)]
    step_error: Annotated[
        float | None,
        Field(description="(predicted - measured) / measured step time. 0.1: the prediction was 10 % too slow."),
    ] = None
    noise_scale: Annotated[
        float | None,
        Field(
            ge=0, description="Gradient noise scale of this run so far, in samples. Unset if the job runs on one rank."
        ),
    ] = None


class Progress(ApiModel):
    step: Annotated[int, Field(ge=0)]
    steps: Annotated[
        int | None,
        Field(ge=1, description="Steps of the whole training. Unset if a script reports no total."),
    ] = None
    epoch: Annotated[int | None, Field(ge=0)] = None
    percent: Annotated[
        int | None, Field(ge=0, le=100, description="Completed part of the steps. Unset if steps is unset.")
    ] = None
    display: Annotated[
        str, Field(description="The value of percent with the sign %, or the step, for printer columns.")
    ] = ""
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="Accuracy on held-out samples.")] = None
    metrics: Annotated[
        dict[str, float] | None,
        Field(max_length=16, description="Last values of the metrics that the script logged, by name."),
    ] = None
    steps_repeated: Annotated[
        int | None,
        Field(
            ge=0,
            description="Steps that ran twice so far, because a restart resumed from an earlier step. Unset if no "
            "step ran twice.",
        ),
    ] = None
    bound_ranks: Annotated[
        int | None,
        Field(
            ge=1,
            description="The number of ranks that the job keeps, because each rank reads its own part of a data "
            "stream. Unset: plans may change the number.",
        ),
    ] = None


class TargetStatus(ApiModel):
    """Values of the metric of spec.until, and when it is predicted to reach its target."""

    metric: str
    value: Annotated[float, Field(description="The last value.")]
    best: float
    remaining_seconds: Annotated[
        float | None,
        Field(ge=0, description="Predicted training time to the target. Unset: the values allow no forecast."),
    ] = None
    remaining_seconds_earliest: Annotated[
        float | None, Field(ge=0, description="Lower end of the interval of remainingSeconds.")
    ] = None
    remaining_seconds_latest: Annotated[
        float | None, Field(ge=0, description="Upper end of the interval of remainingSeconds.")
    ] = None


class LastCheckpoint(ApiModel):
    """The last complete checkpoint, from which the ranks resume after a fault.

    For a script whose folder is uploaded to an object store, it is the last committed upload.
    """

    step: Annotated[
        int | None,
        Field(
            ge=0,
            description="Of an upload: the last step that the script had reported when it wrote the first file of the "
            "checkpoint. Unset: unknown, such as without reports of the script.",
        ),
    ] = None
    time: Annotated[datetime, Field(description="When it was complete. Of an upload: when it was committed.")]
    path: Annotated[
        str,
        Field(
            description="Folder on the volume or in the object store. Of an upload: its commit marker, which lists all "
            "files."
        ),
    ] = ""
    name: Annotated[
        str | None,
        Field(
            max_length=253,
            description="Of an upload: the folder or file in DLJOB_CHECKPOINT_DIR that has changed last, such as "
            "checkpoint-500. Unset for checkpoints of dltrain.",
        ),
    ] = None
    bytes: Annotated[int | None, Field(ge=0, description="Size of all its files. Unset if unknown.")] = None
    write_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            description="Seconds that writing the checkpoint took. Of an upload: seconds until the commit. Unset if "
            "unknown.",
        ),
    ] = None


class Startup(ApiModel):
    """Seconds from the job's creation to its first step, by part."""

    admission_seconds: Annotated[
        float | None,
        Field(
            description="Time from the job's creation until its plan was accepted, and later waits for admission "
            "before the first step."
        ),
    ] = None
    pods_seconds: Annotated[
        float | None,
        Field(
            description="Time from the accepted plan until the agents of all pods had started, without waits for "
            "admission."
        ),
    ] = None
    fetch_seconds: Annotated[
        float | None,
        Field(
            description="Part of podsSeconds: the longest time in which a pod's init container fetched or verified the "
            "data. Unset if there is none, such as with distribution Sharded."
        ),
    ] = None
    rendezvous_seconds: Annotated[
        float | None,
        Field(description="Time from the start of all agents until all ranks had connected to each other."),
    ] = None
    import_seconds: Annotated[
        float | None, Field(description="Time from the connection of all ranks until all libraries were imported.")
    ] = None
    first_step_seconds: Annotated[
        float | None,
        Field(
            description="Time from the import of all libraries until the first step. The model is built in this time."
        ),
    ] = None
    total_seconds: Annotated[
        float | None, Field(description="Total time from the job's creation to its first step.")
    ] = None


class ClassScore(ApiModel):
    name: Annotated[str, Field(max_length=64)]
    f1: Annotated[float, Field(ge=0, le=1, description="Harmonic mean of precision and recall.")]
    samples: Annotated[int, Field(ge=0, description="Held-out samples of the class.")]


class ModelScore(ApiModel):
    name: Annotated[str, Field(max_length=64)]
    value: Annotated[float, Field(description="The main metric on the same held-out samples.")]


class ResultAnalysis(ApiModel):
    """Figures of the model's predictions on held-out data. The run report has all of them."""

    task: Annotated[str, Field(max_length=32, description="classification, regression or language.")]
    samples: Annotated[int, Field(ge=0, description="Number of held-out samples, or of tokens for a language model.")]
    metric: Annotated[str, Field(max_length=48, description="Main metric: accuracy, R2, RMSE or perplexity.")]
    value: float
    baseline: Annotated[
        float | None, Field(description="The main metric of a model that ignores its inputs. Unset if undefined.")
    ] = None
    calibration_error: Annotated[
        float | None,
        Field(ge=0, le=1, description="Expected calibration error. Unset if the predictions have no probabilities."),
    ] = None
    worst_classes: Annotated[
        tuple[ClassScore, ...] | None, Field(max_length=3, description="Classes with the lowest F1.")
    ] = None
    other_models: Annotated[
        tuple[ModelScore, ...] | None,
        Field(
            max_length=5,
            description="Models with which the script compares its own, such as a linear model or trees. Unset if it "
            "names none.",
        ),
    ] = None


class ResultFinding(ApiModel):
    """Something that the curves or the predictions of the run show."""

    name: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=512, description="Description of the finding, with a remedy.")]


class Result(ApiModel):
    """The result of a complete job."""

    steps: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0, description="Training time.")]
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="Accuracy on held-out samples.")] = None
    checkpoint: Annotated[str | None, Field(description="Path of the last checkpoint on the volume.")] = None
    report: Annotated[
        str | None,
        Field(
            description="Path of the run report on the volume, a page with plots. A JSON file beside it has the data."
        ),
    ] = None
    analysis: Annotated[
        ResultAnalysis | None,
        Field(description="Figures of the predictions. Unset if the script did not call dltrain.evaluate."),
    ] = None
    comparison: Annotated[
        str | None,
        Field(
            max_length=600,
            description="How the model compares with the baseline or with other models that the script names, or why "
            "there is no comparison. Unset if there is nothing to compare.",
        ),
    ] = None
    findings: Annotated[
        tuple[ResultFinding, ...] | None,
        Field(
            max_length=8,
            description="Problems such as over-fitting, the most important first. Unset if none was found.",
        ),
    ] = None
