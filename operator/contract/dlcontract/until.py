"""The target at which a training is good enough to stop before its last step."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from dlcontract.record import Record


class Until(Record):
    """A metric and the target at which the training stops: exactly one of ``at_least`` and ``at_most``.

    ``patience``: the training also stops after this number of values in a row that are no better than the best one so
    far. None: only the target stops it before its last step.
    """

    metric: Annotated[str, Field(description="accuracy, loss, or the name of a metric that the script logs.")]
    at_least: float | None = None
    at_most: float | None = None
    patience: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(
                f"until: found at_least {self.at_least} and at_most {self.at_most}; expected a number for exactly one"
            )
        return self

    def reached(self, value: float) -> bool:
        """Return True if ``value`` is as good as the target, or better."""
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)

    def better(self, value: float, other: float) -> bool:
        """Return True if ``value`` is nearer to the target than ``other``, or farther beyond it."""
        return value > other if self.at_least is not None else value < other
