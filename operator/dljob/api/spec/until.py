"""``spec.until``: when a job is good enough to stop before its last step."""

from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Rule


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
