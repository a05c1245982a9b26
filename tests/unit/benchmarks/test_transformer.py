"""Tests of the time of a transformer's iteration under three kinds of parallelism."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from benchmarks.perfmodel.models.transformer import Configuration, IterationModel, fitted, terms

CONSTANTS = {
    "matrix products": 1 / 120e12,
    "activations, split": 3e-12,
    "tensor sums in a node": 8e-12,
    "gradient sum in a node": 2e-11,
    "kernel launches": 1e-4,
    "update": 2e-11,
}


def grid() -> list[Configuration]:
    cuts = [c for c in product((1, 2, 4), repeat=3) if np.prod(c) <= 8]
    return [
        Configuration(64, micro, hidden, 16, layers, 1024, t, d, p)
        for (t, d, p), micro, hidden, layers in product(cuts, (1, 2, 4), (1024, 2048), (12, 24))
        if micro * d <= 64
    ]


def true_s(configurations: list[Configuration]) -> np.ndarray:
    found = terms(configurations)
    return np.asarray(sum(c * found[name] for name, c in CONSTANTS.items()))


def split_in(seed: int, part: float) -> tuple[list[Configuration], list[Configuration]]:
    rows = grid()
    order = np.random.default_rng(seed).permutation(len(rows))
    count = int(part * len(rows))
    return [rows[i] for i in order[:count]], [rows[i] for i in order[count:]]


def test_a_tenth_of_the_rows_predicts_the_rest() -> None:
    given, rest = split_in(0, 0.1)
    found = fitted(given, true_s(given).tolist()).seconds(rest)
    assert np.mean(np.abs(found / true_s(rest) - 1)) < 0.05


def test_parts_sum_to_the_whole_and_are_not_negative() -> None:
    given, rest = split_in(1, 0.2)
    model = fitted(given, true_s(given).tolist())
    without_residual = IterationModel(model.constants, model.known, tuple(0.0 for _ in model.known))
    for configuration in rest[:10]:
        parts = model.parts_s(configuration)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(without_residual.seconds([configuration])[0])


def test_outlier_is_excluded_and_has_little_effect() -> None:
    given, rest = split_in(2, 0.2)
    times = true_s(given)
    clean = fitted(given, times.tolist()).seconds(rest)
    for factor in (1e-3, 1e3):
        bad = times.copy()
        bad[5] *= factor
        model = fitted(given, bad.tolist())
        assert given[5] not in model.known
        assert len(model.known) == len(given) - 1
        assert np.mean(np.abs(np.log(model.seconds(rest) / clean))) < 0.05


def test_one_device_has_no_communication_and_no_bubble() -> None:
    single = Configuration(8, 2, 1024, 16, 24, 1024, 1, 1, 1)
    found = terms([single, replace(single, pipeline=4)])
    for name in ("tensor sums in a node", "tensor sums' latency", "gradient sum in a node", "between stages"):
        assert found[name][0] == 0
    slots = found["a micro-batch"]
    assert slots.tolist() == [4, 4 + 3]


def test_operations_match_narayanan_et_al() -> None:
    """Compare the forward pass with table 1 of Narayanan et al. 2021 (24 layers, hidden 2304, 1.7 billion parameters).

    The table has 96 B s L h², since backward and recomputation make it 4 times the 24 of the forward pass.
    """
    one = Configuration(512, 512, 2304, 24, 24, 2048, 1, 1, 1)
    expected = 24 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304))
    assert terms([one])["matrix products"][0] == pytest.approx(expected)
    assert terms([one])["update"][0] == pytest.approx(1.7e9, rel=0.05)


@pytest.mark.parametrize("field, value", [("layers", 0.0), ("hidden", float("nan")), ("data", -1.0)])
def test_invalid_configuration_is_rejected(field: str, value: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers above 0"):
        replace(grid()[0], **{field: value})


def test_batch_smaller_than_the_ranks_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one micro-batch each"):
        Configuration(4, 2, 1024, 16, 24, 1024, 1, 4, 1)


@pytest.mark.parametrize(
    "times, message", [([], "found none"), ([1.0, 0.0], "found 0 at"), ([1.0], "expected as many")]
)
def test_invalid_times_are_rejected(times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(grid()[:2], times)
