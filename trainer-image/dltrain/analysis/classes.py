"""Accumulate predictions of classes or tokens, merge them over ranks, and compute the metrics of all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dltrain.analysis.result import (
    BINS,
    MAX_CLASSES,
    MAX_NAME,
    MAX_WRONG,
    Bin,
    Calibration,
    ClassFigures,
    Classification,
    Language,
    WrongExample,
)
from dltrain.analysis.rounding import ratio, rounded
from dltrain.analysis.scores import Scored


class ClassPart:
    """The predictions that one rank has seen. All counts are sums, so parts can be merged in any way.

    ``tokens``: True for a language model. Confusions and single examples are then not counted, because there are as
    many classes as tokens in the vocabulary, and millions of positions.
    """

    def __init__(self, *, tokens: bool) -> None:
        self.tokens = tokens
        self.samples = self.invalid = self.correct = self.classes = 0
        self.log_p = 0.0
        self.scored = 0
        """Number of samples with probabilities."""
        self.bins = np.zeros((3, BINS))
        """By bin of confidence: number of samples, sum of confidences, number of correct predictions."""
        self.confusions: Counter[tuple[int, int]] = Counter()
        """Number of samples by (target, prediction)."""
        self.wrong: list[tuple[float, int, int, int]] = []
        """The errors with the highest confidence, as (-confidence or 0, index, target, prediction), in order."""

    def add(self, batch: Scored, index: NDArray[np.int64]) -> None:
        """Add a batch. ``index``: number of each of its samples in the held-out data."""
        right = batch.target == batch.top
        self.samples += len(right)
        self.invalid += batch.invalid
        self.correct += int(right.sum())
        self.classes = max(self.classes, batch.classes)
        if batch.confidence is not None and batch.log_p is not None:
            self.scored += len(right)
            self.log_p += float(batch.log_p.sum())
            numbers = np.minimum((batch.confidence * BINS).astype(np.int64), BINS - 1)
            for row, weights in enumerate((np.ones(len(right)), batch.confidence, right)):
                self.bins[row] += np.bincount(numbers, weights, BINS)
        if self.tokens:
            return
        pairs, counts = np.unique(np.stack([batch.target, batch.top], -1), axis=0, return_counts=True)
        for (target, top), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.confusions[target, top] += count
        places = np.flatnonzero(~right)
        surest = -batch.confidence[places] if batch.confidence is not None else np.zeros(len(places))
        chosen = np.lexsort((index[places], surest))[:MAX_WRONG]
        found = [
            (float(surest[n]), int(index[p]), int(batch.target[p]), int(batch.top[p]))
            for n, p in ((int(n), int(places[n])) for n in chosen)
        ]
        self.wrong = sorted([*self.wrong, *found])[:MAX_WRONG]

    def state(self) -> dict[str, Any]:
        """Return the content for JSON, from which ``of_state`` makes an equal part."""
        return {
            "tokens": self.tokens,
            "counts": [self.samples, self.invalid, self.correct, self.classes, self.scored],
            "log_p": self.log_p,
            "bins": self.bins.tolist(),
            "confusions": [[*pair, count] for pair, count in self.confusions.items()],
            "wrong": self.wrong,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], offset: int = 0) -> Self:
        """Return the part from ``state``, a result of the method ``state``. ``offset``: added to sample numbers."""
        part = cls(tokens=state["tokens"])
        part.samples, part.invalid, part.correct, part.classes, part.scored = state["counts"]
        part.log_p, part.bins = state["log_p"], np.array(state["bins"])
        part.confusions = Counter({(target, top): count for target, top, count in state["confusions"]})
        part.wrong = [(key, index + offset, target, top) for key, index, target, top in state["wrong"]]
        return part

    def merge(self, other: Self) -> None:
        """Add the predictions of another rank."""
        self.samples += other.samples
        self.invalid += other.invalid
        self.correct += other.correct
        self.classes = max(self.classes, other.classes)
        self.scored += other.scored
        self.log_p += other.log_p
        self.bins = self.bins + other.bins
        self.confusions += other.confusions
        self.wrong = sorted([*self.wrong, *other.wrong])[:MAX_WRONG]

    def language(self) -> Language:
        """Return the metrics of a language model, such as its perplexity."""
        mean_nats = -self.log_p / max(1, self.scored)
        return Language(
            vocabulary=self.classes,
            perplexity=rounded(float(np.exp(mean_nats))),
            bits_per_token=rounded(mean_nats / float(np.log(2))),
            accuracy=ratio(self.correct, self.samples) or 0.0,
            calibration=self._calibration(),
        )

    def classification(self, labels: Sequence[str]) -> Classification:
        """Return the metrics of a classifier, such as its accuracy. ``labels``: names of the classes by number; may be
        empty.
        """
        seen = {number for pair in self.confusions for number in pair}
        classes = max(self.classes, len(labels), max(seen, default=-1) + 1)
        support, predicted, correct = Counter[int](), Counter[int](), Counter[int]()
        for (target, top), count in self.confusions.items():
            support[target] += count
            predicted[top] += count
            correct[target] += count if target == top else 0
        numbers = list(range(classes)) if classes <= MAX_CLASSES else []
        if not numbers:
            errors = {n: support[n] + predicted[n] - 2 * correct[n] for n in seen}
            numbers = sorted(sorted(seen, key=lambda n: (-errors[n], -support[n], n))[:MAX_CLASSES])
        row_of = {number: row for row, number in enumerate(numbers)}
        size = len(row_of) + (len(row_of) < classes)
        matrix = np.zeros((size, size), np.int64)
        for (target, top), count in self.confusions.items():
            matrix[row_of.get(target, size - 1), row_of.get(top, size - 1)] += count

        def name(number: int) -> str:
            return (labels[number] if number < len(labels) else str(number))[:MAX_NAME]

        recalls = [correct[n] / support[n] for n in support]
        scores = [2 * correct[n] / (support[n] + predicted[n]) for n in support]
        return Classification(
            classes=classes,
            accuracy=ratio(self.correct, self.samples) or 0.0,
            baseline_accuracy=ratio(max(support.values(), default=0), self.samples) or 0.0,
            balanced_accuracy=rounded(float(np.mean(recalls))) if recalls else 0.0,
            macro_f1=rounded(float(np.mean(scores))) if scores else 0.0,
            figures=tuple(
                ClassFigures(
                    name=name(n),
                    support=support[n],
                    predicted=predicted[n],
                    correct=correct[n],
                    precision=ratio(correct[n], predicted[n]),
                    recall=ratio(correct[n], support[n]),
                    f1=ratio(2 * correct[n], support[n] + predicted[n]),
                )
                for n in numbers
            ),
            confusion=tuple(tuple(row) for row in matrix.tolist()),
            log_loss=rounded(-self.log_p / self.scored) if self.scored else None,
            calibration=self._calibration(),
            wrong=tuple(
                WrongExample(index, name(target), name(top), rounded(-key) if key else None)
                for key, index, target, top in self.wrong
            ),
        )

    def _calibration(self) -> Calibration | None:
        if not self.scored:
            return None
        counts, sums, right = self.bins
        bins = tuple(
            Bin(rounded(float(sums[n] / counts[n])), rounded(float(right[n] / counts[n])), int(counts[n]))
            for n in np.flatnonzero(counts).tolist()
        )
        error = float(np.abs(right - sums).sum()) / self.scored
        return Calibration(rounded(error), bins)
