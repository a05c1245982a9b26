"""Tests of the choice of the checkpoint interval."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlcontract import CheckpointRef
from dlcontract.checkpoint.interval import COST_FRACTION, LONGEST_S, SHORTEST_S, best_interval_s
from dltrain.builtin import rank
from dltrain.checkpoint.interval import Interval, between_faults_s
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_OK, AttemptPlan
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write

HOUR_S = 3600.0


@given(cost_s=st.floats(1e-3, 300), between_s=st.floats(60, 1e7), other=st.floats(0.1, 10))
@example(cost_s=30.0, between_s=1125.0, other=1.0)  # 64 spot nodes; bounded by 2 % of the time before, and 1500 s long
def test_chosen_interval_minimizes_lost_time(cost_s: float, between_s: float, other: float) -> None:
    chosen_s, longest_s = best_interval_s(cost_s, between_s), max(LONGEST_S, cost_s / COST_FRACTION)
    assert SHORTEST_S <= chosen_s <= longest_s

    def lost(interval_s: float) -> float:
        """Return the fraction of time lost to checkpoints and to faults."""
        return cost_s / interval_s + interval_s / (2 * between_s)

    if SHORTEST_S < chosen_s < longest_s:
        assert chosen_s == pytest.approx((2 * cost_s * between_s) ** 0.5)
        assert lost(chosen_s) <= lost(chosen_s * other) * (1 + 1e-9)


def test_observed_faults_outweigh_the_prior() -> None:
    quiet, one = between_faults_s(3, 0, HOUR_S), between_faults_s(3, 1, HOUR_S)
    assert quiet > 300 * HOUR_S and one < 40 * HOUR_S
    assert between_faults_s(3, 100, 100 * HOUR_S) == pytest.approx(HOUR_S, rel=0.5)
    assert between_faults_s(1000, 0, 0.0) == pytest.approx(HOUR_S), (
        "with a thousand pods, the prior is one lost pod per hour"
    )


def test_ranks_of_spot_nodes_choose_the_best_interval_from_the_first_checkpoint_on() -> None:
    """Fixed bug: checkpoints took at most 2 % of the time, however often nodes were interrupted."""
    plan = make_plan(64, checkpoint=CheckpointRef(choose_interval=True, interrupted_s=HOUR_S / 0.05))
    interval = Interval(plan)
    interval.add_cost(30.0)
    assert len(plan.pods) == 64 and interval.seconds(0.0) == pytest.approx(260, abs=1)


def test_fixed_interval_does_not_change() -> None:
    interval = Interval(make_plan(2, checkpoint=CheckpointRef(interval_s=7.0)))
    interval.add_cost(100.0)
    assert interval.seconds(1e6) == 7.0


@pytest.mark.mpi
def test_interval_follows_measured_cost_and_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan sets the time of the first checkpoint. Faults that the agents report shorten the next interval."""
    last_checkpoints: dict[int, rank_messages.Checkpointed] = {}
    for faults in (0, 50):
        folder = tmp_path / str(faults)
        folder.mkdir()
        given = saving(folder, interval_s=0.01, choose_interval=True)
        plan = AttemptPlan.of(make_plan(1, steps=300, checkpoint=given), prior_faults=faults, prior_trained_s=10.0)
        with Listener(folder) as listener:
            monkeypatch.setenv(rank_messages.PLAN_ENV, write(plan, folder))
            monkeypatch.setenv(rank_messages.SOCKET_ENV, listener.path)
            assert rank.main() == EXIT_OK
            listener.wait_for(rank_messages.Finished, 1)
        first, *between, last = listener.of(rank_messages.Checkpointed)
        assert 0 < first.mark.step < last.mark.step == 300, "one at the plan's interval, then one at the end"
        assert faults or not between, "others only after an interval that faults have shortened, on a slow machine"
        last_checkpoints[faults] = last
    assert all(message.cost_s > 0 and message.interval_s for message in last_checkpoints.values())
    without_faults, with_faults = last_checkpoints[0].interval_s, last_checkpoints[50].interval_s
    assert without_faults is not None and with_faults is not None
    assert SHORTEST_S <= with_faults < without_faults / 5 and without_faults <= LONGEST_S


def test_interruptions_of_spot_nodes_shorten_the_interval_before_the_first_fault() -> None:
    hour_s = 3600.0
    calm, spot = between_faults_s(4, 0, 0.0), between_faults_s(4, 0, 0.0, 20 * hour_s)
    assert spot == 5 * hour_s < calm
    assert between_faults_s(4, 100, 100 * hour_s, 20 * hour_s) == pytest.approx(hour_s, rel=0.1)
