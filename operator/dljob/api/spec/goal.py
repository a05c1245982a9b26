"""``spec.task`` and ``spec.until``: what to predict from data, and when the training is good enough."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Duration, Rule, duration_s


class TaskType(StrEnum):
    TABULAR_CLASSIFICATION = "TabularClassification"
    TABULAR_REGRESSION = "TabularRegression"
    TEXT_CLASSIFICATION = "TextClassification"
    LANGUAGE_MODELLING = "LanguageModelling"
    IMAGE_CLASSIFICATION = "ImageClassification"


TEXT_TASKS = (TaskType.TEXT_CLASSIFICATION, TaskType.LANGUAGE_MODELLING)
WITHOUT_TARGET = (TaskType.LANGUAGE_MODELLING, TaskType.IMAGE_CLASSIFICATION)
Column = Annotated[str, Field(min_length=1, max_length=256)]


class Task(ApiModel):
    """The task to solve with the data."""

    rules = (
        Rule(
            "text",
            f"!has(self.text) || self.type in {[member.value for member in TEXT_TASKS]}",
            "text is for the types TextClassification and LanguageModelling: remove it, or choose one of them",
            lambda t: t.text is None or t.type in TEXT_TASKS,
        ),
        Rule(
            "target",
            f"!has(self.target) || !(self.type in {[member.value for member in WITHOUT_TARGET]})",
            "target is for types that predict a column: remove it, or choose another type than LanguageModelling and "
            "ImageClassification",
            lambda t: t.target is None or t.type not in WITHOUT_TARGET,
        ),
        Rule(
            "within",
            "!has(self.within) || self.within.matches('[1-9]')",
            "within must be more than 0: set a time such as 20m, or remove it",
            lambda t: t.within is None or duration_s(t.within) > 0,
        ),
    )

    type: Annotated[
        TaskType,
        Field(
            description="TabularClassification and TabularRegression: predict a column of a table. TextClassification: "
            "predict the class of a text. LanguageModelling: continue a text. ImageClassification: predict the class "
            "of an image, from a folder for each class, WebDataset archives (.tar), or the arrays x and y of an .npz "
            "file."
        ),
    ]
    target: Annotated[
        Column | None, Field(description="Column to predict. Default: found by its name, or else the last column.")
    ] = None
    text: Annotated[
        Column | None, Field(description="Column with the texts, in a table. Default: the one with free text.")
    ] = None
    within: Annotated[
        Duration | None,
        Field(
            description="Limit of the time of reading the data, the baseline and training together, such as 20m, "
            "without waiting for devices. The model and its epochs are chosen to fit, and the script ends in time. "
            "Default: no limit."
        ),
    ] = None


class Until(ApiModel):
    rules = (
        Rule(
            "atLeast",
            "has(self.atLeast) != has(self.atMost)",
            "set exactly one of atLeast and atMost",
            lambda u: (u.at_least is None) != (u.at_most is None),
        ),
    )

    metric: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_][A-Za-z0-9_./-]*$",
            min_length=1,
            max_length=48,
            description="accuracy (on held-out data), loss (of training), or a metric that the script logs with t.log "
            "or dltrain.report.",
        ),
    ]
    at_least: Annotated[float | None, Field(description="Stop when the metric has this value or a higher one.")] = None
    at_most: Annotated[float | None, Field(description="Stop when the metric has this value or a lower one.")] = None
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            le=1000,
            description="Stop also after this number of values in a row that are no better than the best one so far. "
            "Default: only at the target.",
        ),
    ] = None

    @property
    def text(self) -> str:
        """Return the target as text for users, such as 'accuracy at least 0.97, or 5 values without an improvement'."""
        limit = f"at most {self.at_most:g}" if self.at_least is None else f"at least {self.at_least:g}"
        patience = f", or {self.patience} values without an improvement" if self.patience is not None else ""
        return f"{self.metric} {limit}{patience}"
