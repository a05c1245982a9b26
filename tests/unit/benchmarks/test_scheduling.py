"""The simulator of job streams, with policies whose results are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import pytest
from benchmarks.scheduling.joint_foresight import joint_jobs, next_s, options
from benchmarks.scheduling.measures import measures
from benchmarks.scheduling.operator_policy import Operator
from benchmarks.scheduling.simulator import Run, State, simulate
from benchmarks.scheduling.workload import MODELS, START_S, Job, view

from dljob.scheduling.assignment import Held
from dljob.scheduling.pace import MEASURED_P90


def job(name: str, arrival_s: float, noise: float = 1.0) -> Job:
    return Job(name, "resnet18", "team", arrival_s, MODELS["resnet18"], noise, 1, arrival_s + 200.0)


@dataclass
class Script:
    """A policy that gives one device to the first ``most`` jobs, and moves all to two devices at ``grow_s``."""

    most: int
    grow_s: float = inf
    tick_s: float = 10.0

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        devices = 2 if now_s >= self.grow_s else 1
        return {each.job.name: Run(devices, devices, 100.0 / devices, 1000.0) for each in active[: self.most]}


def test_jobs_start_run_and_end() -> None:
    found = simulate([job("a", 0.0), job("b", 10.0, noise=2.0)], Script(most=2), 2)
    assert [state.ended_s for state in found.states] == pytest.approx([START_S + 100, 10 + START_S + 200])
    assert [state.energy_J for state in found.states] == pytest.approx([1000, 2000])
    assert found.held_s == pytest.approx(START_S + 100 + START_S + 200)
    assert measures(found, 2).deadlines == 0.5


def test_a_job_without_devices_waits() -> None:
    found = simulate([job("a", 0.0), job("b", 0.0)], Script(most=1), 1)
    assert [state.started_s for state in found.states] == pytest.approx([0.0, START_S + 100])


def test_a_move_costs_a_restart_and_no_progress() -> None:
    found = simulate([job("a", 0.0)], Script(most=1, grow_s=START_S + 15), 2)
    [state] = found.states
    assert state.moves == 1
    # At 60 s, 15 of 100 s are done. The other 85 s take half as long.
    assert state.ended_s == pytest.approx(60 + START_S + 85 / 2)


def test_more_devices_than_the_pool_has_are_an_error() -> None:
    with pytest.raises(AssertionError, match="2 devices are used of 1"):
        simulate([job("a", 0.0), job("b", 0.0)], Script(most=2), 1)


@pytest.mark.parametrize(("noise", "of_options"), [(2.0, 2.0), (0.5, 1.0)])
def test_policy_knows_the_step_time_of_jobs_that_train_like_the_controller(noise: float, of_options: float) -> None:
    """A job that is slower than predicted is as slow with other plans; one that is faster is not as fast."""
    policy, state = Operator(1.3, all_jobs=True, finish_by=True), State(job("one", 0.0, noise))
    policy._start_on(0.0, state, view())
    predicted_s = policy.placed["one"].choice.prediction.step_s
    assert policy._held(60.0, state).left_s == pytest.approx(predicted_s)
    assert policy._options(state) == options(state)
    assert policy._due_s(60.0, state) == pytest.approx(140.0 / 1.3)
    state.left = 0.5
    assert policy._held(60.0, state).left_s == pytest.approx(0.5 * noise * predicted_s)
    assert policy._options(state) == options(state, of_options)
    assert policy._due_s(60.0, state) == pytest.approx(140.0 / MEASURED_P90)


def test_forecasts_are_less_uncertain_for_jobs_that_train() -> None:
    trains, waits = State(job("trains", 0.0, noise=2.0), left=0.5), State(job("waits", 90.0, noise=2.0))

    def held(state: State) -> Held:
        return Held({"t4": 1}, 100.0) if state is trains else Held({})

    found = joint_jobs(100.0, [trains, waits], lambda state: (), held, {"trains": 60.0}, {"trains": 660.0}, 1.3)
    assert [each.spread for each in found] == [1.1, 1.3]
    assert (found[0].starting_s, found[0].rest_s) == (START_S - 40.0, 560.0)


def test_policy_decides_after_changes_and_at_ends_of_rests_like_the_controller() -> None:
    assert next_s(1000.0, [700.0], changed=False) == 60.0
    assert next_s(1000.0, [700.0], changed=True) == 10.0
    assert next_s(1000.0, [700.0, 1025.0], changed=False) == 25.0
    assert next_s(1000.0, [1000.0], changed=False) == 60.0  # This rest ends now, and the job may move already.


def test_jobs_of_a_namespace_use_no_more_devices_than_its_quota() -> None:
    policy, states = Operator(1.3, all_jobs=True), [State(job(name, 0.0)) for name in ("a", "b", "c")]
    policy.joint.allowed = (3,)
    for count in (1, 3):
        found = policy.decide(0.0, states[:count])
        assert 1 <= sum(run.devices for run in found.values() if run is not None) <= 3
