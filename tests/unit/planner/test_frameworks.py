"""Tests of the comparison of frameworks, and of the constants of communication backends behind it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import Place, StepPoint
from dljob.perf.step.backends import Backend, BackendName, Ratios, backend, source
from dljob.perf.step.communication import Link
from dljob.planner import FrameworkPlan, Learned, LearnedPoint, Request, compare
from dljob.planner.candidates.cost.measured import communication_ratio
from dljob.planner.frameworks import MPI_COLLECTIVES
from support.planner_questions import A100, DIGITS, THREE, decided, view

NAMES = ["dltrain over MPI", "Torchrun with gloo", "parameter server"]
BUSY = Request(job="j", global_batch=96, total_steps=100, model="resnet18", dataset="digits-32", nodes_min=2)
"""A job that communicates in a large part of its step."""


def by_name(found: list[FrameworkPlan]) -> dict[str, FrameworkPlan]:
    return {each.name: each for each in found}


def test_each_framework_gets_its_own_plan_with_error_bars() -> None:
    found = compare(BUSY, view({"count": 6, "cpu": 2, "memory": "16Gi", "bandwidth": "125M"}), {}, uneven=True)
    assert [each.name for each in found] == NAMES
    for each in found:
        assert each.choice is not None and each.backend is not None
        p = each.choice.prediction
        assert 0 < p.step_p10_s < p.step_s < p.step_p90_s
        assert p.step_s**2 == pytest.approx(p.step_p10_s * p.step_p90_s)
        assert p.throughput_per_latency == pytest.approx(96 / p.step_s**2)
    mpi, gloo, server = (each.choice for each in found)
    assert mpi is not None and gloo is not None and server is not None
    assert mpi.collective not in ("ParameterServer", "Torch")
    assert (gloo.collective, server.collective) == ("Torch", "ParameterServer")
    assert server.prediction.step_s > mpi.prediction.step_s, "a server's link carries all gradients"


def test_torchrun_divides_batches_evenly() -> None:
    cluster = view({"device": "cpu-fast", "cpu": "800m"}, {"device": "cpu-slow", "cpu": "200m"})
    found = by_name(compare(replace(DIGITS, nodes_min=2, global_batch=100), cluster, {}, uneven=True))
    shares = {name: [s for g in each.choice.groups for s in g.shares] for name, each in found.items() if each.choice}
    assert shares["Torchrun with gloo"] == [50, 50]
    assert shares["dltrain over MPI"][0] > 60


def test_what_the_job_asks_of_its_framework_does_not_matter() -> None:
    """A job for torchrun, or with an asynchronous server, compares as the same job without these fields does."""
    plain = compare(BUSY, THREE, {}, uneven=True)
    asked = replace(BUSY, collective="Torch", synchronization="Asynchronous", uneven=False)
    assert compare(asked, THREE, {}, uneven=True) == plain


def test_gpus_use_nccl_without_constants() -> None:
    found = compare(
        BUSY, view({"count": 2, "device": A100, "devices": 2, "cpu": 32, "memory": "128Gi"}), {}, uneven=True
    )
    assert [each.name for each in found[:2]] == ["dltrain over NCCL", "Torchrun with NCCL"]
    assert all(each.choice is not None and each.backend is None for each in found[:2])
    assert found[2].choice is None and "GPUs" in found[2].reason


def test_job_without_a_plan_says_why() -> None:
    found = compare(replace(BUSY, nodes_min=9), THREE, {}, uneven=True)
    assert [each.name for each in found] == NAMES
    assert all(each.choice is None and each.reason.startswith("spec.") for each in found)
    assert compare(replace(BUSY, missing=("model",)), THREE, {}, uneven=True) == []


def test_measured_steps_of_dltrain_predict_the_other_frameworks_by_their_ratio() -> None:
    """Steps that were measured with MPI change all rows; gloo's communication keeps its ratio to MPI's."""
    steps = (StepPoint(Place(2, 1, "Ring"), 48, 4.0, 3),)
    known = {("resnet18", "cpu"): Learned((LearnedPoint(48, 0.5),), 1e-4, 1e8, steps=steps)}
    cluster = view({"count": 2, "cpu": 2, "memory": "16Gi"})
    mpi, gloo, _ = compare(replace(BUSY, profile="resnet18"), cluster, known, uneven=True)
    assert mpi.choice is not None and gloo.choice is not None
    own, other = mpi.choice.prediction, gloo.choice.prediction
    assert own.basis == other.basis == "profile"
    assert own.step_s == pytest.approx(4.0, rel=0.3), "the measured step counts, not the formula"
    slower = backend("Gloo").between.bandwidth < backend("MPI").between.bandwidth
    assert (other.step_s > own.step_s) == slower


@given(st.floats(1e-6, 1e-3), st.floats(1e6, 1e11), st.sampled_from([1, 2]), st.floats(0, 1))
def test_a_backend_scales_a_link_and_can_be_undone(latency_s: float, bps: float, nodes: int, spread: float) -> None:
    own = Backend("Gloo", Ratios(2.0, 0.5, 0.3), Ratios(3.0, 0.25, 0.4), 2**20)
    link = Link(latency_s, bps, near_latency_s=latency_s / 10)
    used, wider = own.over(link, spread, nodes)
    factor, part = (3.0, 0.25) if nodes == 1 else (2.0, 0.5)
    assert used.latency_s == pytest.approx(factor * latency_s) and used.bandwidth_Bps == pytest.approx(part * bps)
    assert used.inside_s == pytest.approx(3.0 * latency_s / 10)
    assert wider >= spread
    back = own.undone(used, nodes)
    assert (back.latency_s, back.bandwidth_Bps, back.inside_s) == pytest.approx((latency_s, bps, latency_s / 10))


def test_ratio_to_a_ring_over_mpi_is_that_of_the_constants() -> None:
    """Without latency, a ring of a backend takes as long as MPI's, divided by the ratio of their bandwidths."""
    base, gloo, mpi = Link(0.0, 1e6, 1e15), backend("Gloo"), backend("MPI")
    link, _ = gloo.over(base, 0.0, 2)
    found = float(communication_ratio("Torch", 2**26, 4, 4, link, backend=gloo))
    assert found == pytest.approx(mpi.between.bandwidth / gloo.between.bandwidth, rel=1e-6)
    own, _ = mpi.over(base, 0.0, 2)
    assert float(communication_ratio("Ring", 2**26, 4, 4, own, backend=mpi)) == pytest.approx(1)


def test_constants_have_a_source() -> None:
    found = source()
    assert "framework_constants" in found.command and found.machine and found.links and found.date >= "2026"
    for name in ("MPI", "Gloo", "ParameterServer"):
        for ratios in (backend(name).between, backend(name).within):
            assert ratios.latency > 0 and ratios.bandwidth > 0 and ratios.spread > 0


def test_documented_ratios_are_the_stored_ones() -> None:
    text = (Path(__file__).parents[3] / "docs/explanation/planning-frameworks.md").read_text()
    rows: dict[BackendName, str] = {"Gloo": "gloo", "ParameterServer": "parameter server"}
    rows["MPI"] = "dltrain over MPI (ring, halving-doubling, butterfly)"
    for name, label in rows.items():
        ratios = backend(name).between
        assert f"| {label} | {ratios.latency:.2f} | {ratios.bandwidth:.2f} | {ratios.spread:.2f} |" in text


def test_dltrain_over_mpi_never_is_a_server() -> None:
    """With slow messages, the planner itself would choose a server."""
    known = {("mlp", "cpu"): Learned((LearnedPoint(16, 1e-4),), 5e-3, 1e9)}
    request = Request(job="j", global_batch=32, total_steps=100, model="mlp", dataset="iris", nodes_min=3, nodes_max=3)
    assert decided(request, THREE, known).chosen.collective == "ParameterServer"
    mpi, gloo, server = (each.choice for each in compare(request, THREE, known, uneven=True))
    assert mpi is not None and server is not None and gloo is not None
    assert mpi.collective in MPI_COLLECTIVES
    assert server.prediction.step_s < mpi.prediction.step_s < gloo.prediction.step_s
