"""A device on which little was measured, from the same workloads on others."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.perfmodel.models.probes import with_probes
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.perf.fit.new_device import Point, Sheet, next_probe, seconds

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
def test_data_sheets_carry_times_over(compute_part: float) -> None:
    known, asked = table("old", "mid", "new", compute_part=compute_part), list(table("big"))
    found = seconds(SHEETS, known, asked)
    assert found == pytest.approx([true_s(p, compute_part) for p in asked], rel=0.15)


def test_a_probe_tells_of_the_whole_device() -> None:
    """A device half as fast as its sheet says."""
    known, slow = table("old", "mid", "new"), {p: 2 * s for p, s in table("big").items()}
    probe = Point("big", "a", 16.0)
    asked = [p for p in slow if p != probe]
    before, after = seconds(SHEETS, known, asked), seconds(SHEETS, {**known, probe: slow[probe]}, asked)
    measured = np.array([slow[p] for p in asked])
    assert np.abs(np.log(after / measured)).max() < 0.6 * np.abs(np.log(before / measured)).min()


def test_two_probes_of_a_workload_are_near_its_line() -> None:
    slow = {p: 3 * s for p, s in table("big").items()}
    probes = {p: slow[p] for p in slow if p.workload == "a" and p.batch in (8.0, 64.0)}
    asked = [p for p in slow if p.workload == "a" and p not in probes]
    found = with_probes(SHEETS, table("old", "mid", "new"), probes, asked)
    assert found == pytest.approx([slow[p] for p in asked], rel=0.05)


@settings(max_examples=20)
@given(st.sampled_from(list(table("old", "mid", "new"))), st.sampled_from([1e-3, 1e3]))
def test_one_absurd_measurement_moves_little(bad: Point, factor: float) -> None:
    known, asked = table("old", "mid", "new"), list(table("big"))
    clean = seconds(SHEETS, known, asked)
    found = seconds(SHEETS, {**known, bad: factor * known[bad]}, asked)
    assert np.abs(np.log(found / clean)).max() < np.log(2)


@given(st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_does_not_depend_on_the_unit_of_time(k: float) -> None:
    known, asked = table("old", "mid", "new"), list(table("big"))
    scaled = seconds(SHEETS, {p: k * s for p, s in known.items()}, asked)
    assert scaled == pytest.approx(k * seconds(SHEETS, known, asked), rel=1e-2)


def test_the_next_probe_is_of_the_workload_less_is_known_of() -> None:
    known = [*table("old", "mid", "new"), Point("big", "a", 8.0), Point("big", "a", 64.0)]
    candidates = [Point("big", w, b) for w in ("a", "b") for b in BATCHES if not (w == "a" and b in (8.0, 64.0))]
    assert next_probe(SHEETS, known, candidates).workload == "b"
    assert next_probe(SHEETS, known, candidates[:1]) == candidates[0]


@pytest.mark.parametrize(
    "known, asked, message",
    [
        ({}, [Point("big", "a", 8.0)], "0 known"),
        ({Point("old", "a", 8.0): 1.0}, [Point("tpu", "a", 8.0)], "device tpu: not in the catalogue"),
        ({Point("old", "a", 8.0): 1.0}, [Point("big", "z", 8.0)], "workload z: measured on no device"),
        ({Point("old", "a", 8.0): 0.0}, [Point("big", "a", 8.0)], "found 0 at position 0"),
        ({Point("old", "a", 8.0): float("nan")}, [Point("big", "a", 8.0)], "found nan"),
        ({Point("old", "a", 8.0): 1.0}, [Point("big", "a", -8.0)], "batch: found -8"),
    ],
)
def test_what_is_wrong_is_named(known: dict[Point, float], asked: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seconds(SHEETS, known, asked)


def test_a_sheet_without_bandwidth_is_named() -> None:
    with pytest.raises(ValueError, match="bandwidth 0 B/s"):
        replace(SHEETS["old"], bandwidth_Bps=0.0)


def test_what_one_device_of_a_vendor_makes_of_a_workload_is_expected_of_its_others() -> None:
    """The libraries of "x" are four times slower on workload b, on a device unlike the one that is asked for."""
    vendors = {"old": "x", "mid": "y", "new": "y"}
    known = {p: s * (4 if p.workload == "b" and p.device == "old" else 1) for p, s in table(*vendors).items()}
    probes = {p: s for p, s in table("big").items() if p.workload == "a"}
    asked = [Point("big", "b", b) for b in BATCHES]

    def ratio(vendor: str) -> float:
        sheets = {d: replace(s, vendor=(vendors | {"big": vendor})[d]) for d, s in SHEETS.items()}
        return float(np.median(with_probes(sheets, known, probes, asked) / [true_s(p) for p in asked]))

    assert ratio("x") > 2.5
    assert ratio("y") < 1.3
