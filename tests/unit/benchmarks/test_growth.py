"""Tests of the prediction for more devices from measurements on one and two."""

import numpy as np
import pytest
from benchmarks.perfmodel.models.growth import SOFTNESS, Pair, communication_s, on_devices
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dljob.perf.fit.fitting import Floats

pairs = st.lists(
    st.builds(
        lambda b, one_s, ratio: Pair(b, one_s, one_s * ratio),
        st.sampled_from([8.0, 16.0, 32.0, 64.0]),
        st.floats(0.1, 0.4),
        st.floats(0.8, 4.0),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda p: p.batch,
)


def predicted(known: list[Pair], devices: int) -> Floats:
    """Return the prediction. Reject the example if its probes contradict each other, for which there is none."""
    try:
        return on_devices(known, devices)
    except ValueError as error:
        assert "expected most to agree" in str(error)
        reject()


@settings(max_examples=25)
@given(pairs)
def test_step_with_the_same_batch_is_never_faster_on_more_devices(known: list[Pair]) -> None:
    four, eight = predicted(known, 4), predicted(known, 8)
    assert np.all(four >= [p.one_s for p in known])
    assert np.all(eight >= four)


@settings(max_examples=25)
@given(pairs, st.floats(0.01, 100.0))
def test_prediction_scales_with_the_unit_of_time(known: list[Pair], k: float) -> None:
    scaled = [Pair(p.batch, k * p.one_s, k * p.two_s) for p in known]
    assert predicted(scaled, 8) == pytest.approx(k * predicted(known, 8), rel=1e-6)


def test_communication_of_two_devices_is_recovered() -> None:
    known = [Pair(b, 0.01 * b, float(((0.01 * b) ** SOFTNESS + 0.2**SOFTNESS) ** (1 / SOFTNESS))) for b in (8, 16, 32)]
    assert communication_s(known) == pytest.approx([0.2] * 3, rel=0.15)


def test_impossible_probe_is_corrected_by_other_batches() -> None:
    """The step of the largest batch was faster on two devices than on one, which must be noise."""
    good = [Pair(b, 0.01 * b, 0.01 * b + 0.1) for b in (8.0, 16.0, 32.0)]
    by_itself = communication_s([Pair(64.0, 0.64, 0.62)])[0]
    with_others = communication_s([*good, Pair(64.0, 0.64, 0.62)])[-1]
    assert by_itself < with_others
    assert 0.05 < with_others < 0.3


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_outlier_probe_does_not_affect_the_others(factor: float) -> None:
    good = [Pair(b, 0.01 * b, 0.01 * b + 0.1) for b in (8.0, 16.0, 32.0)]
    bad = Pair(64.0, 0.64, 0.74 * factor)
    clean, found = on_devices([*good, Pair(64.0, 0.64, 0.74)], 8), on_devices([*good, bad], 8)
    assert found == pytest.approx(clean, rel=0.15)


@pytest.mark.parametrize("one_s, two_s", [(0.0, 1.0), (1.0, float("nan")), (-1.0, 1.0), (1.0, float("inf"))])
def test_invalid_times_are_rejected(one_s: float, two_s: float) -> None:
    with pytest.raises(ValueError, match="on one"):
        Pair(8.0, one_s, two_s)


def test_probes_of_which_most_do_not_agree_are_rejected() -> None:
    halves = [Pair(b, 0.375, 0.75) for b in (8.0, 16.0)] + [Pair(b, 0.125, 0.125) for b in (32.0, 64.0)]
    with pytest.raises(ValueError, match="expected most to agree"):
        on_devices(halves, 4)


def test_impossible_probes_are_rejected() -> None:
    with pytest.raises(ValueError, match="probe again"):
        on_devices([Pair(8.0, 1.0, 0.001)], 4)


def test_missing_probes_are_rejected() -> None:
    with pytest.raises(ValueError, match="no probe on two devices"):
        on_devices([], 4)
    with pytest.raises(ValueError, match="expected 2 or more"):
        on_devices([Pair(8.0, 1.0, 1.5)], 1)
