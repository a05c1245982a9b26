"""Tests of shrinking after the death of ranks: survivors compute the same as one process."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dltrain.builtin import rank
from dltrain.checkpoint.store import MODEL
from dltrain.elastic.shrinking import inherit
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_OK, EXIT_PEER_LOST
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import BODIES, command, end, run, start

DYING = BODIES / "faults/rank_that_dies.py"
STEPS = 60
WITHIN_S = 1.0


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.data())
def test_share_of_a_lost_rank_goes_to_the_survivors(shares: list[int], data: st.DataObject) -> None:
    alive = data.draw(st.sets(st.sampled_from(range(len(shares))), min_size=1))
    after = inherit(shares, sorted(alive))
    assert sum(after) == sum(shares)
    for number, (old, new) in enumerate(zip(shares, after, strict=True)):
        assert new >= old if number in alive else new == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the weights that one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
        patch.setenv(rank_messages.PLAN_ENV, write(make_plan(1, steps=STEPS, checkpoint=saving(folder)), folder))
        assert rank.main() == EXIT_OK
    return weights(folder)


def weights(folder: Path) -> Path:
    return folder / "digits-0001" / f"step-{STEPS:010d}" / MODEL


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("collective", "deaths", "alive", "micro_batches"),
    [
        ("Ring", ["0 loss 20"], (1, 2), 1),
        pytest.param("Auto", ["1 loss 20"], (0, 2), 1, marks=pytest.mark.long),
        ("HalvingDoubling", ["1 agree 20"], (0, 2), 1),
        ("Tree", ["2 evaluate 2"], (0, 1), 1),
        ("MPI", ["1 loss 20", "2 loss 40"], (0,), 1),
        pytest.param("Ring", ["0 loss 20", "1 loss 20"], (2,), 1, marks=pytest.mark.long),
        pytest.param("Ring", ["1 loss 41"], (0, 2), 2, marks=pytest.mark.long),
        ("Ring", ["1 loss 42"], (0, 2), 2),
    ],
    ids=lambda value: "+".join(map(str, value)).replace(" ", "-") if isinstance(value, list | tuple) else str(value),
)
def test_survivors_finish_training(
    collective: str, deaths: list[str], alive: tuple[int, ...], micro_batches: int, alone: Path, tmp_path: Path
) -> None:
    strategy: dict[str, Any] = {"measure_collective": True} if collective == "Auto" else {"collective": collective}
    strategy["micro_batches"] = micro_batches
    plan = make_plan(3, shares=[50, 40, 30], steps=STEPS, checkpoint=saving(tmp_path), **strategy)
    words = " ".join(deaths).split()
    with Listener(tmp_path) as listener:
        arguments = command(3, DYING, *words, ulfm=True)
        process = start(arguments, DLTRAIN_PLAN=write(plan, tmp_path), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, len(alive))
        ended = end(process, 30)
    last = {message.rank: message for message in listener.of(rank_messages.Shrunk)}
    assert {number: last[number].alive for number in alive} == dict.fromkeys(alive, alive), ended.output
    assert len({last[number].step for number in alive}) == 1
    assert max(last[number].shrink_s for number in alive) < WITHIN_S
    resharded = [message.shares for message in listener.of(rank_messages.Resharded) if message.rank == alive[0]]
    assert sum(resharded[-1]) == 120 and all(bool(s) == (n in alive) for n, s in enumerate(resharded[-1]))
    steps = [message for message in listener.of(rank_messages.Step) if message.rank == alive[0]]
    assert steps[-1].world_size == len(alive) and steps[-1].step == STEPS and steps[-1].measure.agree_s > 0
    trained, reference = load_file(weights(tmp_path)), load_file(alone)
    assert max(float((trained[key] - reference[key]).norm() / reference[key].norm()) for key in trained) < 1e-5


@pytest.mark.mpi
def test_run_fails_with_fewer_ranks_than_the_minimum(tmp_path: Path) -> None:
    plan = make_plan(3, epochs=1000, min_ranks=2)
    with Listener(tmp_path) as listener:
        arguments = command(3, DYING, "1", "loss", "20", "2", "loss", "60", ulfm=True)
        process = start(arguments, DLTRAIN_PLAN=write(plan, tmp_path), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Failed, 1)
        end(process, 30)
    (failed,) = listener.of(rank_messages.Failed)
    assert failed.failure.exit_code == EXIT_PEER_LOST
    assert re.search("found 1 ranks left; expected at least 2", failed.failure.message)


@pytest.mark.mpi
def test_death_of_a_rank_between_micro_batches_does_not_change_the_result() -> None:
    ended = run(command(3, BODIES / "faults/sum_and_die.py", "3", ulfm=True))
    assert ended.output.count("off by") == 1 and "Traceback" not in ended.output, ended.output


@pytest.mark.mpi
def test_death_of_a_rank_between_gathers_does_not_change_the_result() -> None:
    ended = run(command(3, BODIES / "faults/gather_and_die.py", "3", ulfm=True))
    assert ended.output.count("off by") == 1 and "Traceback" not in ended.output, ended.output
