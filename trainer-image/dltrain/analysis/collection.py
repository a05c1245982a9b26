"""Analyse the predictions of one rank, batch by batch, and merge the parts of all ranks."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltrain.analysis.classes import ClassPart
from dltrain.analysis.residuals import ResidualPart
from dltrain.analysis.result import Analysis, Task
from dltrain.analysis.scores import are_logits, array, is_second_class, scored, task_of

TASKS: tuple[Task, ...] = ("classification", "regression", "language")


class Collection:
    """The predictions of one rank. Call ``add`` for each batch, then ``merged`` with the ``packed`` parts of all ranks.

    ``task``: None to derive it from the first batch. Raise ValueError for another name.
    """

    def __init__(self, task: Task | None = None) -> None:
        if task is not None and task not in TASKS:
            raise ValueError(f"task: found {task!r}; expected {', '.join(TASKS)}. Leave it out to derive it")
        self._task = task
        self._part: ClassPart | ResidualPart | None = None
        self._as_logits: ClassPart | None = None
        """The predictions of one number for each sample, read as logits, which ``_part`` reads as probabilities."""
        self._logits = False
        """True if one of these numbers cannot be a probability. All numbers of all ranks are then logits."""
        self._only_0_and_1 = task is None
        """True if the task was not given, and all targets so far are the numbers 0 and 1, as of two classes."""
        self._seen = 0
        self._numbered = False
        """True if the script has given the numbers of samples."""

    def add(self, predictions: Any, targets: Any, index: Any = None) -> None:
        """Add a batch of predictions and targets, whose possible shapes ``scores.task_of`` lists.

        ``index``: number of each sample in the held-out data. By default, samples are numbered in their order, over all
        ranks. Raise ValueError for values that do not fit.
        """
        if predictions is None:
            return
        if not hasattr(predictions, "__len__") or getattr(predictions, "ndim", 1) == 0:
            raise ValueError(
                f"predictions: found {type(predictions).__name__}; expected an array, a tensor or a list with an entry "
                "for each sample. Pass the tensor in it, such as output.logits"
            )
        if len(predictions) == 0:
            return
        truth = array(targets)
        if not hasattr(predictions, "shape"):
            predictions = array(predictions)
        if self._task is None:
            self._task = task_of(predictions, truth)
        if self._part is None:
            self._part = ResidualPart() if self._task == "regression" else ClassPart(tokens=self._task == "language")
        numbers = np.arange(self._seen, self._seen + len(truth))
        if index is not None:
            numbers, self._numbered = array(index, "index").astype(np.int64).reshape(-1), True
            if len(numbers) != len(truth):
                raise ValueError(f"index: found {len(numbers)} numbers; expected one for each of {len(truth)} samples")
        self._seen += len(truth)
        if isinstance(self._part, ResidualPart):
            self._only_0_and_1 = self._only_0_and_1 and bool(((truth == 0) | (truth == 1)).all())
            self._part.add(array(predictions), truth, numbers)
        else:
            self._add_classes(self._part, predictions, truth, numbers)

    def _add_classes(self, part: ClassPart, predictions: Any, truth: NDArray[Any], numbers: NDArray[np.int64]) -> None:
        """Add a batch to ``part``, and to ``_as_logits``. The batches of all ranks show what single numbers are."""
        per_sample = max(1, truth.size // len(truth))
        if is_second_class(predictions, truth):
            self._logits = self._logits or are_logits(predictions)
            self._as_logits = self._as_logits or ClassPart(tokens=part.tokens)
            batch = scored(predictions, truth, logits=True)
            self._as_logits.add(batch, numbers[batch.position // per_sample])
            if self._logits:
                return
        batch = scored(predictions, truth)
        part.add(batch, numbers[batch.position // per_sample])

    @property
    def seems_classification(self) -> bool:
        """Return True if this rank's targets are read as those of a regression, but look like those of two classes."""
        return isinstance(self._part, ResidualPart) and self._only_0_and_1

    def packed(self) -> bytes:
        """Return this rank's part for ``merged``. It is small unless a classifier of many classes often errs."""
        part = self._part.state() if self._part is not None else None
        offset = 0 if self._numbered else self._seen
        as_logits = self._as_logits.state() if self._as_logits is not None else None
        content = {"task": self._task, "offset": offset, "part": part, "logits": self._logits, "as_logits": as_logits}
        return json.dumps(content).encode()


def merged(parts: Iterable[bytes], labels: Sequence[str] = ()) -> Analysis | None:
    """Return the analysis of all ranks' predictions, or None if there are none.

    ``parts``: results of ``Collection.packed``, by rank. ``labels``: names of the classes, by class number. Raise
    ValueError if ranks have different tasks.
    """
    total: ClassPart | ResidualPart | None = None
    found: Task | None = None
    offset = 0
    contents = [json.loads(text) for text in parts]
    logits = any(content["logits"] for content in contents)
    for content in contents:
        if content["part"] is not None:
            if found not in (None, content["task"]):
                raise ValueError(f"task: found {found} and {content['task']} on different ranks; expected one task")
            found = content["task"]
            kind = ResidualPart if found == "regression" else ClassPart
            state = content["as_logits"] if logits and content["as_logits"] is not None else content["part"]
            part = kind.of_state(state, offset)
            if total is None:
                total = part
            else:
                total.merge(part)  # type: ignore[arg-type]  # Equal tasks have parts of one class.
        offset += content["offset"]
    if total is None or found is None or not (total.samples or total.invalid):
        return None
    if isinstance(total, ResidualPart):
        return Analysis(found, total.samples, total.invalid, regression=total.regression())
    if found == "language":
        return Analysis(found, total.samples, total.invalid, language=total.language())
    return Analysis(found, total.samples, total.invalid, classification=total.classification(labels))
