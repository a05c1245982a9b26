"""Tests of the comparison of rules of decision, with invented predictions."""

import numpy as np
from benchmarks.perfmodel.tasks.decision_rules import RULES, Case, table
from benchmarks.perfmodel.tasks.decisions import Candidates

TWO = Candidates(np.array([8.0, 8.0]), np.array([2.0, 4.0]), (np.array([0, 1]),))
UNCERTAIN_IS_SLOW = Case("a cluster, a model", TWO, np.array([1.5, 1.0]), np.array([0.9, 1.0]), np.array([0.5, 0.1]))


def test_each_rule_has_a_row_for_each_source_and_for_all() -> None:
    rows = table([UNCERTAIN_IS_SLOW]).rows
    assert [row[0] for row in rows] == [f"{s}, k = {k:g}" for k in RULES for s in ("a cluster", "all")]


def test_median_chooses_the_uncertain_candidate_and_p90_the_certain_one() -> None:
    mean = {row[0]: row[2] for row in table([UNCERTAIN_IS_SLOW]).rows}
    assert mean["all, k = 0"] == 50.0
    assert mean["all, k = 1.28"] == 0.0
