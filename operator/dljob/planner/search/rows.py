"""Candidates of the search as arrays. A candidate uses at most one option of each type of device.

An option is a way to use one type of device, and a type has dozens of them. An array with an element for each type of
device and candidate is therefore several times as small as one with an element for each option.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dljob.planner.candidates.options import Option

Integers = NDArray[np.int64]
Values = NDArray[Any]
"""An array with an element for each option."""


@dataclass(frozen=True)
class Rows:
    """Candidates, as two arrays of shape (types of device, candidates)."""

    option: Integers
    """Index of the option that a candidate uses of each type of device; of any of them if it uses none."""
    nodes: Integers
    """Number of nodes of each type of device; 0 if a candidate does not use the type."""

    def __len__(self) -> int:
        return int(self.nodes.shape[1])

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        return self.nodes > 0

    @cached_property
    def total_nodes(self) -> Integers:
        """Return the number of nodes of each candidate."""
        found: Integers = self.nodes.sum(axis=0)
        return found

    def __getitem__(self, picked: Values) -> "Rows":
        """Return the candidates at some indices, or those for which an array of booleans is True."""
        return Rows(self.option[:, picked], self.nodes[:, picked])

    def of(self, values: Values, default: float) -> Values:
        """Return the values of the options of each candidate; ``default`` for a type of device that it does not use."""
        return np.where(self.used, values[self.option], default)

    def largest(self, values: Values, default: float = 0.0) -> Values:
        """Return the largest of the values of each candidate's options."""
        return np.asarray(self.of(values, default).max(axis=0))

    def smallest(self, values: Values, default: float = np.inf) -> Values:
        """Return the smallest of the values of each candidate's options."""
        return np.asarray(self.of(values, default).min(axis=0))

    def summed(self, values: Values) -> Values:
        """Return the sum of the values of each candidate's nodes. ``values``: the value of a node of each option."""
        return np.asarray((self.nodes * values[self.option]).sum(axis=0))

    def pairs(self, at: int) -> list[tuple[int, int]]:
        """Return (index of the option, number of nodes) of each type of device that a candidate uses."""
        both = zip(self.option[:, at].tolist(), self.nodes[:, at].tolist(), strict=True)
        return [(option, nodes) for option, nodes in both if nodes]


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the candidates of all ``parts``, of which there is at least one, in their order."""
    return Rows(np.concatenate([p.option for p in parts], axis=1), np.concatenate([p.nodes for p in parts], axis=1))


class Types:
    """The types of device of a list of options. It makes ``Rows`` of these options.

    ``members``: for each type, the indices of its options. ``of_option``: for each option, the number of its type.
    """

    def __init__(self, options: Sequence[Option]) -> None:
        labels = [option.label for option in options]
        distinct = list(dict.fromkeys(labels))
        self.of_option = np.array([distinct.index(label) for label in labels], dtype=np.int64)
        self.members = [np.flatnonzero(self.of_option == number) for number in range(len(distinct))]
        self._first = np.array([members[0] for members in self.members], dtype=np.int64)

    def empty(self, count: int) -> Rows:
        """Return ``count`` candidates without nodes, as arrays that may be changed."""
        return Rows(np.repeat(self._first[:, None], count, axis=1), np.zeros((len(self.members), count), np.int64))

    def rows(self, candidates: Sequence[dict[int, int]]) -> Rows:
        """Return a candidate for each mapping from the index of an option to its number of nodes."""
        found = self.empty(len(candidates))
        at = np.repeat(np.arange(len(candidates)), np.array([len(nodes) for nodes in candidates], dtype=np.int64))
        option = np.array([i for nodes in candidates for i in nodes], dtype=np.int64)
        found.option[self.of_option[option], at] = option
        found.nodes[self.of_option[option], at] = [n for nodes in candidates for n in nodes.values()]
        return found
