"""The document ``suggestion.json``, which the look pod of a job writes and the operator reads as untrusted input."""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dljob.api import DLJobSpec
from dljob.job.spec_errors import in_words

SUGGESTION_KEY = "suggestion.json"
"""Key of the document in the ConfigMap ``<job>-suggestion``. The other keys are the files of the project."""
SCRIPTS = ("data.py", "model.py", "train.py", "predict.py", "baseline.py")
"""Names of the keys with scripts."""
JUDGED = "baseline.json"
"""Key with the scores of the baseline on the test part, which ``train.py`` compares with those of its model."""
RACE = "race.py"
"""Key with the script of a race between settings, in a project whose training begins with one."""
FILES = (*SCRIPTS, JUDGED, RACE)
"""Names of all keys but ``SUGGESTION_KEY``."""
BASELINE_S = 120
"""Seconds after which the look pod stops the baseline, at the latest. Chosen, not measured."""
MAX_NBYTES = 64 * 2**10
"""Maximum size of the document."""
MAX_SCRIPTS_NBYTES = 768 * 2**10
"""Maximum size of all scripts together. An object of Kubernetes has at most 1 MiB."""
MAX_ALTERNATIVES, MAX_FINDINGS, MAX_LINES, MAX_BASELINES = 4, 20, 8, 4
MAX_ERROR, MAX_LINE, MAX_NAME = 1500, 400, 100
"""Maximum lengths of an error, of a line for users, and of the name of a model, in characters."""
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$"
"""Texts come from the user's data, and are printed on terminals."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=_PRINTABLE)]
Line = Annotated[str, Field(max_length=MAX_LINE, pattern=_PRINTABLE)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Alternative(_Document):
    model: Name
    parameters: Annotated[int, Field(ge=1, le=10**12)]
    why: Line


class SuggestedModel(_Document):
    """The recommended model, and what the operator needs to plan its training."""

    name: Name
    why: Line
    parameters: Annotated[int, Field(ge=1, le=10**12)]
    flops_per_sample: Annotated[float, Field(gt=0, le=10**18)]
    activation_nbytes: Annotated[int, Field(ge=0, le=10**15)]
    batch: Annotated[int, Field(ge=1, le=2**20)]
    epochs: Annotated[int, Field(ge=1, le=10**6)]
    samples: Annotated[int, Field(ge=1, le=10**12)]
    sample_nbytes: Annotated[int, Field(ge=1, le=10**12)]
    data_nbytes: Annotated[
        int, Field(ge=0, le=10**12, description="Upper limit of the memory that the data takes in each rank.")
    ] = 0


class BaselineScore(_Document):
    """Scores of a model of the baseline, in the measure of its ``JudgedBaseline``.

    ``validation``: mean on held-out folds of the training part. ``error``: its standard error. ``test``: score on the
    test part; None: undefined.
    """

    model: Annotated[str, Field(min_length=1, max_length=64, pattern=_PRINTABLE)]
    validation: float
    error: Annotated[float, Field(ge=0)]
    test: float | None = None


class JudgedBaseline(_Document):
    """The scores of models without deep learning, or the reason why there are none (``problem``)."""

    measure: Annotated[str, Field(max_length=32, pattern=_PRINTABLE)] | None = None
    scores: Annotated[tuple[BaselineScore, ...], Field(max_length=MAX_BASELINES, strict=False)] = ()
    seconds: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    problem: Line | None = None

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.problem is None) != bool(self.scores and self.measure):
            raise ValueError("found both or neither of scores with their measure and problem; expected one of them")
        return self


class Suggestion(_Document):
    """The result of a look pod: a model, or an error of the data."""

    schema_number: Literal[1] = 1
    uid: Annotated[str, Field(max_length=64)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$", max_length=32)]
    """``task_digest`` of the spec for which the pod looked."""
    error: Annotated[str, Field(min_length=1, max_length=MAX_ERROR, pattern=_PRINTABLE)] | None = None
    model: SuggestedModel | None = None
    alternatives: Annotated[tuple[Alternative, ...], Field(max_length=MAX_ALTERNATIVES, strict=False)] = ()
    data: Annotated[tuple[Line, ...], Field(max_length=MAX_LINES, strict=False)] = ()
    findings: Annotated[tuple[Line, ...], Field(max_length=MAX_FINDINGS, strict=False)] = ()
    baseline: Annotated[JudgedBaseline | None, Field(description="None: of an earlier release.")] = None

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.error is None) == (self.model is None):
            raise ValueError("found both or neither of error and model; expected one of them")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the document in a JSON text. Raise ValueError with the field, the value and what is expected."""
        if len(text) > MAX_NBYTES:
            raise ValueError(f"{SUGGESTION_KEY}: found {len(text)} characters; expected at most {MAX_NBYTES}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(
                printable(in_words(error, SUGGESTION_KEY, "docs/how-to/model-from-data.md"), 1000)
            ) from None

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False)


def task_digest(spec: DLJobSpec) -> str:
    """Return the digest of the fields of a spec on which the suggestion depends: 16 digits each for task and data."""
    assert spec.task is not None, "only a job with a task has a suggestion"
    parts: tuple[Any, ...] = (spec.task.manifest(), [spec.dataset.uri, spec.dataset.sha256])
    return "".join(hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16] for part in parts)


def same_task(digest: str, other: str) -> bool:
    """Return True if two digests are of the same task, of the same data or not."""
    return digest[:16] == other[:16]


def printable(text: str, most: int) -> str:
    """Return a text without control characters and line breaks, shortened to ``most`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 2]} …"
