"""Tests of predictions for a device with few measurements, from the same workloads on other devices."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.perfmodel.models.probes import next_probe, with_probes
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.perf.fit.new_device import Point, Sheet, seconds

SHEETS = {
    "old": Sheet(4e12, 240e9),
    "mid": Sheet(10e12, 700e9),
    "new": Sheet(16e12, 900e9),
    "big": Sheet(60e12, 3000e9),
}
BATCHES = (8.0, 16.0, 32.0, 64.0)


def true_s(point: Point, compute_part: float = 0.5) -> float:
    sheet = SHEETS[point.device]
    work = {"a": 2e12, "b": 5e11}[point.workload] * (4 + point.batch)
    return float((work / sheet.peak_FLOPs) ** compute_part * (work / 20 / sheet.bandwidth_Bps) ** (1 - compute_part))


def table(*devices: str, compute_part: float = 0.5) -> dict[Point, float]:
    points = [Point(d, w, b) for d in devices for w in ("a", "b") for b in BATCHES]
    return {p: true_s(p, compute_part) for p in points}


@pytest.mark.parametrize("compute_part", [0.2, 0.5, 0.8])
def test_data_sheets_transfer_times_to_a_new_device(compute_part: float) -> None:
    known, wanted = table("old", "mid", "new", compute_part=compute_part), list(table("big"))
    found = seconds(SHEETS, known, wanted)
    assert found == pytest.approx([true_s(p, compute_part) for p in wanted], rel=0.15)


def test_one_probe_improves_all_predictions_of_the_device() -> None:
    """The device is half as fast as its data sheet says."""
    known, slow = table("old", "mid", "new"), {p: 2 * s for p, s in table("big").items()}
    probe = Point("big", "a", 16.0)
    wanted = [p for p in slow if p != probe]
    before, after = seconds(SHEETS, known, wanted), seconds(SHEETS, {**known, probe: slow[probe]}, wanted)
    measured = np.array([slow[p] for p in wanted])
    assert np.abs(np.log(after / measured)).max() < 0.6 * np.abs(np.log(before / measured)).min()


def test_two_probes_of_a_workload_predict_its_other_batches() -> None:
    slow = {p: 3 * s for p, s in table("big").items()}
    probes = {p: slow[p] for p in slow if p.workload == "a" and p.batch in (8.0, 64.0)}
    wanted = [p for p in slow if p.workload == "a" and p not in probes]
    found = with_probes(SHEETS, table("old", "mid", "new"), probes, wanted)
    assert found == pytest.approx([slow[p] for p in wanted], rel=0.05)


@settings(max_examples=20)
@given(st.sampled_from(list(table("old", "mid", "new"))), st.sampled_from([1e-3, 1e3]))
def test_one_outlier_has_little_effect(bad: Point, factor: float) -> None:
    known, wanted = table("old", "mid", "new"), list(table("big"))
    clean = seconds(SHEETS, known, wanted)
    found = seconds(SHEETS, {**known, bad: factor * known[bad]}, wanted)
    assert np.abs(np.log(found / clean)).max() < np.log(2)


@given(st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_prediction_scales_with_the_unit_of_time(k: float) -> None:
    known, wanted = table("old", "mid", "new"), list(table("big"))
    scaled = seconds(SHEETS, {p: k * s for p, s in known.items()}, wanted)
    assert scaled == pytest.approx(k * seconds(SHEETS, known, wanted), rel=1e-2)


def test_next_probe_is_of_the_workload_with_fewer_measurements() -> None:
    known = [*table("old", "mid", "new"), Point("big", "a", 8.0), Point("big", "a", 64.0)]
    candidates = [Point("big", w, b) for w in ("a", "b") for b in BATCHES if not (w == "a" and b in (8.0, 64.0))]
    assert next_probe(SHEETS, known, candidates).workload == "b"
    assert next_probe(SHEETS, known, candidates[:1]) == candidates[0]


@pytest.mark.parametrize(
    "known, wanted, message",
    [
        ({}, [Point("big", "a", 8.0)], "found 0 measured"),
        ({Point("old", "a", 8.0): 1.0}, [Point("tpu", "a", 8.0)], "device tpu: found no data sheet"),
        ({Point("old", "a", 8.0): 1.0}, [Point("big", "z", 8.0)], "workload z: found no measured step time"),
        ({Point("old", "a", 8.0): 0.0}, [Point("big", "a", 8.0)], "found 0 at position 0"),
        ({Point("old", "a", 8.0): float("nan")}, [Point("big", "a", 8.0)], "found nan"),
        ({Point("old", "a", 8.0): 1.0}, [Point("big", "a", -8.0)], "batch: found -8"),
    ],
)
def test_invalid_input_is_rejected(known: dict[Point, float], wanted: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seconds(SHEETS, known, wanted)


def test_data_sheet_without_bandwidth_is_rejected() -> None:
    with pytest.raises(ValueError, match="bandwidth 0 B/s"):
        replace(SHEETS["old"], bandwidth_Bps=0.0)


def test_slowdown_of_a_workload_is_transferred_between_devices_of_a_vendor() -> None:
    """The libraries of "x" are four times slower on workload b, measured on another device."""
    vendors = {"old": "x", "mid": "y", "new": "y"}
    known = {p: s * (4 if p.workload == "b" and p.device == "old" else 1) for p, s in table(*vendors).items()}
    probes = {p: s for p, s in table("big").items() if p.workload == "a"}
    wanted = [Point("big", "b", b) for b in BATCHES]

    def ratio(vendor: str) -> float:
        sheets = {d: replace(s, vendor=(vendors | {"big": vendor})[d]) for d, s in SHEETS.items()}
        return float(np.median(with_probes(sheets, known, probes, wanted) / [true_s(p) for p in wanted]))

    assert ratio("x") > 2.5
    assert ratio("y") < 1.3
