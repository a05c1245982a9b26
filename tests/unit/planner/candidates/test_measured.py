"""Tests of predictions from steps measured on several devices, and of the next suggested measurement."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import RankMeasure, Report, RunPhase
from dljob.api import ComputePoint, DLProfileStatus, ScalingPoint
from dljob.calibrate import Learned, LearnedPoint, Place, StepPoint
from dljob.cluster import ClusterView
from dljob.job.profiles import learned, updated_profile
from dljob.perf.fit.scaling import Constants, Runs, steps
from dljob.perf.step.communication import Link
from dljob.planner import Choice, FixedChoice, Request
from dljob.planner.candidates.cost.measured import communication_ratio
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import layouts
from dljob.planner.candidates.options import Option, options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.search import objective
from dljob.planner.search.screen import Screen
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, view

TRUE = Constants(0.2, 0.1, 0.2, -5.0, 0.2, 0.02, 0.05, 0.03, -2.0, 0.6)
REFERENCE_S = 0.1
CLUSTER = view({"count": 8, "device": T4, "devices": 4, "cpu": 16})
KEY = ("resnet50", T4)
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def one_s(batch: int) -> float:
    return 0.02 + 0.004 * batch


def truth(nodes: int, per_node: int, batch: int, alone_s: Callable[[int], float] = one_s) -> float:
    """Return the step time of a cluster that follows the model, with a network unknown to data sheets."""
    columns = [[float(x)] for x in (nodes, per_node, nodes * per_node, batch, alone_s(batch))]
    return float(np.exp(steps(TRUE, Runs(*np.array(columns)), REFERENCE_S).log_s[0]))


def slow_one_s(batch: int) -> float:
    """Return the step time of a device that needs longer for 16 samples than for 32."""
    return (3.0 if batch == 16 else 1.0) * one_s(batch)


def profile(
    *places: tuple[int, int, int], collective: str = "Torch", alone_s: Callable[[int], float] = one_s
) -> Learned:
    """Return a profile of one device at four batches, with steps at (nodes, devices per node, batch per device)."""
    points = tuple(LearnedPoint(b, alone_s(b), 50) for b in (8, 16, 32, 64))
    steps = (StepPoint(Place(n, k, collective), b, truth(n, k, b, alone_s)) for n, k, b in places)
    return Learned(points, steps=tuple(steps))


FEW = ((1, 4, 16), (2, 1, 16), (4, 4, 16), (8, 2, 16), (8, 4, 16))


def fixed(nodes: int, per_node: int, known: Learned, batch: int = 16) -> Choice:
    request = replace(RESNET, global_batch=nodes * per_node * batch, fixed=(FixedChoice("t4", nodes, per_node),))
    return decided(request, CLUSTER, {KEY: known}).chosen


class TestPredictions:
    def test_few_measured_steps_predict_all_placements(self) -> None:
        places = [(n, k) for n in (1, 2, 4, 8) for k in (1, 2, 4) if n * k > 1]

        def error(known: Learned) -> float:
            errors = [fixed(n, k, known).prediction.step_s / truth(n, k, 16) - 1 for n, k in places]
            return float(np.mean(np.abs(errors)))

        assert error(profile(*FEW)) < 0.06
        assert error(profile()) > 0.2

    @pytest.mark.parametrize("place", [(2, 4), (4, 2)])
    def test_each_measured_step_narrows_the_interval(self, place: tuple[int, int]) -> None:
        widths = [(p := fixed(*place, profile(*FEW[:count])).prediction).step_p90_s / p.step_s for count in range(1, 6)]
        assert widths[-1] < widths[0]
        near = fixed(*place, profile((*place, 16))).prediction
        assert near.step_p90_s / near.step_s < widths[0], "the placement itself is the most informative"

    def test_predictions_follow_a_batch_that_is_slow_on_one_device(self) -> None:
        known = profile((1, 4, 32), (2, 1, 32), (4, 4, 32), (8, 2, 64), (8, 4, 8), alone_s=slow_one_s)
        for nodes, per_node in ((2, 2), (4, 1), (8, 1)):
            slow_s, fast_s = (fixed(nodes, per_node, known, b).prediction.step_s for b in (16, 32))
            assert slow_s > 1.2 * fast_s
            assert slow_s == pytest.approx(truth(nodes, per_node, 16, slow_one_s), rel=0.15)
            assert fast_s == pytest.approx(truth(nodes, per_node, 32, slow_one_s), rel=0.15)

    def test_plan_names_the_basis_of_its_prediction(self) -> None:
        found = fixed(8, 1, profile(*FEW), batch=1).prediction
        assert found.basis == "profile"
        assert "communication" in found.bottleneck and "(measured on several devices)" in found.bottleneck
        parts = found.compute_s + found.communication_s + found.data_s
        assert parts == pytest.approx(found.step_s)

    def test_prediction_for_one_device_ignores_steps_on_several(self) -> None:
        without_steps, with_steps = fixed(1, 1, profile()).prediction, fixed(1, 1, profile(*FEW)).prediction
        assert without_steps == with_steps

    def test_device_without_measured_steps_is_predicted_by_formulas(self) -> None:
        cluster = view({"device": T4, "devices": 4, "cpu": 16}, {"device": A100, "devices": 4, "cpu": 16})
        request = replace(RESNET, global_batch=128, fixed=(FixedChoice("t4", 1, 4), FixedChoice("a100", 1, 4)))
        points = {KEY: profile(), ("resnet50", A100): profile()}
        plain = decided(request, cluster, points).chosen
        assert decided(request, cluster, {**points, KEY: profile(*FEW)}).chosen == plain
        both = {**points, KEY: profile(*FEW), ("resnet50", A100): profile(*FEW)}
        assert decided(request, cluster, both).chosen.prediction.step_s == pytest.approx(truth(2, 4, 16), rel=0.1)

    def test_steps_with_a_sharded_optimizer_predict_only_such_plans(self) -> None:
        few = profile(*FEW)
        sharded = replace(few, steps=tuple(replace(s, place=replace(s.place, sharded=True)) for s in few.steps))
        assert fixed(4, 2, sharded).prediction == fixed(4, 2, profile()).prediction
        request = replace(RESNET, global_batch=128, fixed=(FixedChoice("t4", 4, 2),), strategy="Optimizer")
        predicted = decided(request, CLUSTER, {KEY: sharded}).chosen.prediction
        assert predicted.step_s == pytest.approx(truth(4, 2, 16), rel=0.1)
        assert decided(request, CLUSTER, {KEY: few}).chosen.prediction.step_s != pytest.approx(
            predicted.step_s, rel=0.1
        )

    @pytest.mark.parametrize("bad_s", [1e-9, 1e9])
    def test_outlier_step_is_ignored(self, bad_s: float) -> None:
        """The fit ignores steps that are off by orders of magnitude. Steps without a time never reach a profile."""
        good = profile(*FEW)
        bad = replace(good, steps=(*good.steps, StepPoint(Place(4, 1, "Torch"), 16, bad_s)))
        assert fixed(4, 2, bad).prediction == fixed(4, 2, good).prediction


sizes, links = st.integers(1, 10**9), st.builds(Link, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.just(1e12))


class TestCollectives:
    @given(sizes, st.integers(2, 64), links)
    def test_communication_ratio_of_two_collectives(self, nbytes: int, n: int, link: Link) -> None:
        assert communication_ratio("Ring", nbytes, n, n, link) == communication_ratio("Torch", nbytes, n, n, link) == 1
        assert communication_ratio("DDP", nbytes, n, n, link) <= 1 + 1e-12, "a ring of the same bytes in fewer buckets"
        assert communication_ratio("MPI", nbytes, n, n, link) <= 1 + 1e-12, (
            "MPI uses the best algorithm, which may be a ring"
        )
        assert communication_ratio("Tree", nbytes, n, n, link) >= communication_ratio(
            "Butterfly", nbytes, n, n, link
        ) * (1 - 1e-12)

    @given(st.floats(0.1, 10), st.integers(2, 16), st.integers(1, 8))
    def test_ratio_scales_only_communication(self, ratio: float, nodes: int, per_node: int) -> None:
        columns = [[float(x)] for x in (nodes, per_node, nodes * per_node, 8, 0.05)]
        scaled = steps(TRUE, Runs(*np.array(columns), np.array([ratio])), REFERENCE_S).log_s
        moved = replace(TRUE, log_inter=TRUE.log_inter + np.log(ratio))
        assert scaled == pytest.approx(steps(moved, Runs(*np.array(columns)), REFERENCE_S).log_s)

    def test_collective_is_predicted_from_steps_measured_with_another(self) -> None:
        """Steps were measured with a ring at low bandwidth. A tree sends more and is predicted to be slower."""
        cluster, key = view({"count": 8, "cpu": 2}), ("digits-cnn", "cpu")
        measured = profile((2, 1, 16), (4, 1, 16), (8, 1, 16), collective="Ring")
        known = {key: replace(measured, link_latency_s=1e-5, link_bandwidth_Bps=1e7)}
        # The user states the cost of the model, so that the planner believes times far from it.
        parameters = int(workload_of(DIGITS).parameters)
        request = replace(DIGITS, model=None, profile="digits-cnn", parameters=parameters, flops_per_sample=1e6)
        request = replace(request, global_batch=128, fixed=(FixedChoice("cpu", 8),), activation_nbytes_per_sample=1000)
        ring, tree = (
            decided(replace(request, collective=c), cluster, known).chosen.prediction for c in ("Ring", "Tree")
        )
        assert ring.step_s == pytest.approx(truth(8, 1, 16), rel=0.05)
        assert tree.communication_s > 1.2 * ring.communication_s


class TestScreen:
    @pytest.mark.parametrize("alone_s", [one_s, slow_one_s])
    @pytest.mark.parametrize("is_gpu", [True, False])
    def test_screening_agrees_with_the_exact_prediction(self, *, is_gpu: bool, alone_s: Callable[[int], float]) -> None:
        device = {"device": T4, "devices": 4} if is_gpu else {"device": "cpu"}
        cluster = view({"count": 8, "cpu": 16, "memory": "64Gi", **device})
        label = T4 if is_gpu else "cpu"
        known = {("resnet50", label): profile(*((n, k if is_gpu else 1, b) for n, k, b in FEW), alone_s=alone_s)}
        found_options = rank_options(replace(RESNET, global_batch=256), cluster, known)
        request, workload = replace(RESNET, global_batch=256), workload_of(RESNET)
        screen = Screen(found_options, request, workload)
        # The screen does not round the local batch sizes to whole samples.
        for i in [i for i, o in enumerate(found_options) if 256 % o.ranks_per_node == 0]:
            for count in (1, 2, 4, 8):
                found = screen.screen(screen.types.rows([{i: count}]))
                collective = screen.collectives[found.collective[0]]
                exact = evaluate([Part(found_options[i], count)], collective, request, workload)
                assert isinstance(exact, Choice)
                assert found.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)
                assert found.step_p90_s[0] == pytest.approx(exact.prediction.step_p90_s, rel=0.03)


def rank_options(request: Request, cluster: ClusterView, known: dict[tuple[str, str], Learned]) -> list[Option]:
    return [
        o
        for pool in eligible(request, cluster).pools
        for g in layouts(pool, request)
        for o in options(pool, g, workload_of(request), request, known)
    ]


class TestChoice:
    def test_p90_decides_between_predictions_of_different_uncertainty(self) -> None:
        """With a deadline or measured steps, the p90 is minimized. With data sheets only, the median is minimized."""
        request = replace(RESNET, global_batch=256)
        for known, deadline_s in (({}, None), ({KEY: profile(*FEW)}, None), ({}, 1e6)):
            decision = decided(replace(request, deadline_s=deadline_s, candidates_kept=10), CLUSTER, known)
            cautious = bool(known) or deadline_s is not None
            best = min((c.prediction.step_p90_s if cautious else c.prediction.step_s) for c in decision.candidates)
            chosen = decision.chosen.prediction
            assert (chosen.step_p90_s if cautious else chosen.step_s) <= best * (1 + objective.INDISTINCT)
            if cautious and decision.refusals:
                assert not any("slower" in r.reason and "(p90)" not in r.reason for r in decision.refusals)


class TestNextMeasurement:
    REQUEST = replace(RESNET, global_batch=256)

    def suggestion(self, known: Learned, **changes: Any) -> str | None:
        return decided(replace(self.REQUEST, **changes), CLUSTER, {KEY: known}).next_measurement

    def test_measurements_are_suggested_until_five_steps_are_measured(self) -> None:
        for count in range(5):
            found = self.suggestion(profile(*FEW[:count]))
            assert found is not None and "reduces the variance" in found
            for nodes, per_node, _ in FEW[:count]:
                each = f" ({per_node} ranks each)" if per_node > 1 else ""
                assert not found.startswith(f"{nodes} x {T4}{each},"), "a measured placement is not suggested again"
        assert self.suggestion(profile(*FEW)) is None

    def test_benefit_of_a_suggestion_falls_with_more_measurements(self) -> None:
        texts = [self.suggestion(profile(*FEW[:count])) for count in (0, 4)]
        first, last = (float(re.search(r"by (\d+) %", text or "")[1]) for text in texts)  # type: ignore[index]
        assert first > last

    def test_suggested_measurements_predict_better_than_arbitrary_ones(self) -> None:
        """The suggested placements give better predictions than as many runs with one device per node."""

        def error(known: Learned) -> float:
            places = [(n, k) for n in (1, 2, 4, 8) for k in (1, 2, 4) if n * k > 1]
            return float(np.mean([abs(fixed(n, k, known).prediction.step_s / truth(n, k, 16) - 1) for n, k in places]))

        measured: list[tuple[int, int, int]] = []
        for _ in range(3):
            text = self.suggestion(profile(*measured))
            assert text is not None
            found = re.match(r"(\d+) x \S+?(?: \((\d+) ranks each\))?, (\d+) sample", text)
            assert found, text
            measured.append((int(found[1]), int(found[2] or 1), int(found[3])))
        assert error(profile(*measured)) < error(profile((2, 1, 128), (3, 1, 85), (4, 1, 64)))

    def test_nothing_is_suggested_without_alternatives(self) -> None:
        assert self.suggestion(profile(), nodes_max=1, fixed=()) is not None, "a node has four devices"
        assert decided(replace(DIGITS, nodes_max=1), THREE).next_measurement is None
        assert self.suggestion(profile(), fixed=(FixedChoice("t4", 2, 1),)) is None

    def test_profile_status_contains_the_suggestion(self) -> None:
        status = DLProfileStatus()
        for i, nodes in enumerate((2, 3, 4, 5, 6)):
            ranks = tuple(RankMeasure(rank=r, device="t4", share=32, compute_s=0.010) for r in range(nodes))
            reported = Report(
                uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=1.0,
                ranks=ranks, step_s=0.017,
            )  # fmt: skip
            status = updated_profile(status, "mlp", "t4", reported, NOW, Place(nodes, 1, "Torch"))
            found = DLProfileStatus.model_validate(status.manifest()).next_measurement
            if i == 4:
                assert found is None, "five measurements are enough"
            else:
                assert found is not None and found.node_devices == 1 and found.nodes <= 2 * nodes
                assert (found.nodes, found.batch) not in {(p.nodes, p.batch) for p in status.scaling}


def test_profile_stores_the_collective() -> None:
    status = DLProfileStatus(
        compute=(ComputePoint(batch=8, seconds=0.05),),
        scaling=(
            ScalingPoint(nodes=2, node_devices=1, devices=2, batch=8, seconds=0.06, collective="Tree", sharded=True),
        ),
    )
    (step,) = learned(DLProfileStatus.model_validate(status.manifest())).steps
    assert step == StepPoint(Place(2, 1, "Tree", sharded=True), 8, 0.06)
    old = {"nodes": 2, "nodeDevices": 1, "devices": 2, "batch": 8, "seconds": 0.06}
    assert ScalingPoint.model_validate(old).collective == "Ring", "older profiles do not contain the collective"
