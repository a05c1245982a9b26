"""Tests of whole runs of the built-in trainer and of scripts, on real ranks."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlcontract import ModelRef, OptimizerRef, Plan
from dltrain.builtin import rank
from dltrain.checkpoint.store import MODEL, OPTIMIZER, STATE
from dltrain.optim.learning_rate import rate
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_OK, EXIT_PARAMETERS_DIVERGED, EXIT_PEER_LOST, EXIT_STOPPED
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import BODIES, ROOT, Ended, command, end, run, run_ranks, start
from support.trainer.resume import stop_and_resume

pytestmark = pytest.mark.mpi
DYING = BODIES / "faults/rank_that_dies.py"
SCRIPTS = ROOT / "examples" / "scripts"


def train(plan: Plan, folder: Path, **env: Any) -> Ended:
    return run_ranks(len(plan.ranks), "-m", "dltrain.builtin.rank", DLTRAIN_PLAN=write(plan, folder), **env)


def hashes(folder: Path, step: int) -> list[str]:
    """Return the hashes of a checkpoint's tensor files."""
    path = folder / "digits-0001" / f"step-{step:010d}"
    return [hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (MODEL, OPTIMIZER)]


def loss_scale(folder: Path, step: int) -> Any:
    """Return the state of the GradScaler in a checkpoint."""
    return json.loads((folder / "digits-0001" / f"step-{step:010d}" / STATE).read_text())["loss_scale"]


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the parameters in a checkpoint."""
    return load_file(folder / "digits-0001" / f"step-{step:010d}" / MODEL)


@pytest.mark.long
def test_three_ranks_learn_digits(tmp_path: Path) -> None:
    plan = make_plan(
        3, model=ModelRef(name="digits-cnn"), epochs=12, rebalance=True, shares=[60, 40, 20], measure_collective=True
    )
    with Listener(tmp_path) as listener:
        train(plan, tmp_path, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 3)
    outcomes = [message.outcome for message in listener.of(rank_messages.Finished)]
    assert all(outcome.accuracy is not None and outcome.accuracy >= 0.97 for outcome in outcomes)
    assert all(hello.device == "cpu" for hello in listener.of(rank_messages.Hello))
    probed = listener.of(rank_messages.Probed)
    assert len(probed) == 3 and all(p.link_latency_s and p.link_bandwidth_Bps for p in probed)
    chosen = [sum_ for message in listener.of(rank_messages.Chosen) for sum_ in message.sums]
    assert len(chosen) >= 3 and all(sum_.strategy and sum_.bandwidth_Bps > 0 for sum_ in chosen)
    measures = {step.rank: step.measure for step in listener.of(rank_messages.Step)}
    assert all(m.compute_s > 0 and m.comm_s > 0 and m.wait_s >= 0 and m.data_s > 0 for m in measures.values())
    # In a small network, either pass may take longer. With the update, they add up to the compute time.
    assert all(
        0.1 * m.compute_s < part < m.compute_s for m in measures.values() for part in (m.forward_s, m.backward_s)
    )
    assert all(m.forward_s + m.backward_s < m.compute_s and m.sum_s > 0 for m in measures.values())


def test_two_ranks_learn_digits_with_compressed_gradients(tmp_path: Path) -> None:
    plan = make_plan(2, model=ModelRef(name="digits-cnn"), epochs=12, shares=[80, 40], compression="BF16")
    with Listener(tmp_path) as listener:
        train(plan, tmp_path, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 2)
    outcomes = [message.outcome for message in listener.of(rank_messages.Finished)]
    assert all(outcome.accuracy is not None and outcome.accuracy >= 0.97 for outcome in outcomes)


@pytest.mark.parametrize("precision", [pytest.param("BF16", marks=pytest.mark.long), "FP16"])
def test_built_in_models_learn_in_16_bits(precision: Any, tmp_path: Path) -> None:
    """Checkpoints hold float32 parameters and, with float16, the scaler, so a run resumes in any precision."""
    plan = make_plan(2, epochs=16, shares=[80, 40], precision=precision, checkpoint=saving(tmp_path))
    with Listener(tmp_path) as listener:
        train(plan, tmp_path, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 2)
        outcome = listener.of(rank_messages.Finished)[0].outcome
    assert outcome.accuracy is not None and outcome.accuracy >= 0.9
    last = max((tmp_path / "digits-0001").glob("step-*"))
    assert all(tensor.dtype == torch.float32 for tensor in load_file(last / MODEL).values())
    assert ('"scaler"' in "".join(path.read_text() for path in last.glob("*.json"))) == (precision == "FP16")


@pytest.mark.long
def test_built_in_run_in_float16_resumes_its_loss_scale(tmp_path: Path) -> None:
    """Stopped and resumed in new processes, a run ends with the loss scale and parameters of an uninterrupted one."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fields: dict[str, Any] = {"shares": [70, 50], "steps": 400, "precision": "FP16"}
    for folder in (whole, halves):
        folder.mkdir()
    train(make_plan(2, **fields, checkpoint=saving(whole)), whole)
    stop_and_resume(make_plan(2, **fields, checkpoint=saving(halves)), halves, evaluations=2, steps=400)
    assert hashes(whole, 400) == hashes(halves, 400)
    states = [loss_scale(folder, 400) for folder in (whole, halves)]
    assert states[0] == states[1] and states[0]["scaler"]["_growth_tracker"] > 100


def test_parameter_server_does_not_compute(tmp_path: Path) -> None:
    plan = make_plan(3, shares=[80, 40, 0], collective="ParameterServer", rebalance=True, checkpoint=saving(tmp_path))
    with Listener(tmp_path) as listener:
        train(plan, tmp_path, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 3)
    accuracy = {message.rank: message.outcome.accuracy for message in listener.of(rank_messages.Finished)}
    assert accuracy[0] == accuracy[1] is not None and accuracy[2] is None
    assert {message.outcome.steps for message in listener.of(rank_messages.Finished)} == {24}
    assert [bool(p.points) for p in sorted(listener.of(rank_messages.Probed), key=lambda p: p.rank)] == [
        True,
        True,
        False,
    ]
    assert {message.measure.share for message in listener.of(rank_messages.Step) if message.rank == 2} == {0}


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.long), 0.9])
def test_layered_server_equals_one_process(momentum: float, tmp_path: Path) -> None:
    """Rank 0 owns the parameters, and the learning rate follows the workers' schedule."""
    alone, layered = tmp_path / "alone", tmp_path / "layered"
    optimizer = OptimizerRef(momentum=momentum)
    plan = make_plan(3, shares=[0, 80, 40], collective="LayeredServer", optimizer=optimizer, steps=20)
    for folder in (alone, layered):
        folder.mkdir()
    train(make_plan(1, shares=[120], optimizer=optimizer, steps=20, checkpoint=saving(alone)), alone)
    with Listener(layered) as listener:
        train(plan.model_copy(update={"checkpoint": saving(layered)}), layered, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 3)
    accuracy = {message.rank: message.outcome.accuracy for message in listener.of(rank_messages.Finished)}
    assert accuracy[0] is None and accuracy[1] == accuracy[2] is not None
    ours, theirs = (weights(folder, 20) for folder in (layered, alone))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


@pytest.mark.long
def test_run_with_micro_batches_resumes_exactly(tmp_path: Path) -> None:
    """Ranks with uneven shares divide each of them into three micro-batches, before and after the restart."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fields: dict[str, Any] = {"shares": [70, 50], "micro_batches": 3, "steps": 400}
    for folder in (whole, halves):
        folder.mkdir()
    train(make_plan(2, **fields, checkpoint=saving(whole)), whole)
    stop_and_resume(make_plan(2, **fields, checkpoint=saving(halves)), halves, evaluations=2, steps=400)
    assert hashes(whole, 400) == hashes(halves, 400)


@pytest.mark.long
def test_layered_server_resumes_exactly(tmp_path: Path) -> None:
    """The server's optimizer state is in the checkpoint, which rank 0 writes."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fields = {"shares": [0, 70, 50], "collective": "LayeredServer", "steps": 400}
    for folder in (whole, halves):
        folder.mkdir()
    train(make_plan(3, **fields, checkpoint=saving(whole)), whole)
    stop_and_resume(make_plan(3, **fields, checkpoint=saving(halves)), halves, evaluations=2, steps=400)
    assert hashes(whole, 400) == hashes(halves, 400)


def test_stopped_run_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed with the same shares, a run is bit-identical to an uninterrupted one. One rank agrees up to rounding."""
    whole, halves, moved = (tmp_path / name for name in ("whole", "halves", "moved"))
    for folder in (whole, halves):
        folder.mkdir()
    shares, steps = [70, 50], 400
    train(make_plan(2, shares=shares, steps=steps, checkpoint=saving(whole)), whole)
    plan = make_plan(2, shares=shares, steps=steps, checkpoint=saving(halves))
    with Listener(halves) as listener:
        arguments = command(2, "-m", "dltrain.builtin.rank")
        process = start(arguments, DLTRAIN_PLAN=write(plan, halves), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Step, 3)
        listener.stop()
        assert end(process, 30).code == EXIT_STOPPED
    (stopped,) = {mark.mark.step for mark in listener.of(rank_messages.Checkpointed)}
    assert 0 < stopped < steps, "stopped in the middle"
    shutil.copytree(halves / "digits-0001", moved / "digits-0001")

    resumed = train(plan, halves)
    first = re.search(r"step (\d+)/400", resumed.output)
    assert first is not None and int(first[1]) == stopped + 1
    assert hashes(whole, steps) == hashes(halves, steps)

    monkeypatch.setenv(rank_messages.PLAN_ENV, write(make_plan(1, steps=steps, checkpoint=saving(moved)), moved))
    assert rank.main() == EXIT_OK
    a, b = (load_file(folder / "digits-0001" / f"step-{steps:010d}" / MODEL) for folder in (whole, moved))
    assert max(float((a[key] - b[key]).norm() / a[key].norm()) for key in a) < 1e-4


@pytest.mark.long
def test_run_with_ddp_resumes_exactly(tmp_path: Path) -> None:
    """The buckets of the first step after a restart are those of all steps, so that sums are rounded in the same way."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fields: dict[str, Any] = {"shares": [60, 40, 20], "steps": 400, "collective": "DDP", "bucket_nbytes": 16384}
    for folder in (whole, halves):
        folder.mkdir()
    train(make_plan(3, **fields, checkpoint=saving(whole)), whole)
    stop_and_resume(make_plan(3, **fields, checkpoint=saving(halves)), halves, evaluations=2, steps=400)
    assert hashes(whole, 400) == hashes(halves, 400)


@pytest.mark.parametrize("collective", ["Ring", "DDP"])
def test_ranks_exit_when_a_required_rank_dies(collective: str, tmp_path: Path) -> None:
    plan = make_plan(3, model=ModelRef(name="digits-cnn"), epochs=1000, min_ranks=3, collective=collective)
    with Listener(tmp_path) as listener:
        arguments = command(3, DYING, "2", "loss", "20", ulfm=True)
        process = start(arguments, DLTRAIN_PLAN=write(plan, tmp_path), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Failed, 2)
        ended = end(process, 30)
    failures = [message.failure for message in listener.of(rank_messages.Failed)]
    assert {failure.reason for failure in failures} == {"PeerLost"}, failures
    assert {message.failure.exit_code for message in listener.of(rank_messages.Failed)} == {EXIT_PEER_LOST}
    assert ended.code != 0
    assert not any(message.failure.counts for message in listener.of(rank_messages.Failed))


def test_a_flipped_bit_is_noticed_and_never_saved(tmp_path: Path) -> None:
    """All ranks report it. The run resumes from the checkpoint before it and is bit-identical to an undisturbed one."""
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    for folder in (whole, flipped):
        folder.mkdir()
    train(make_plan(3, steps=60, checkpoint=saving(whole)), whole)
    plan = make_plan(3, steps=60, compare_steps=20, checkpoint=saving(flipped, interval_s=1e-3, keep=100))
    arguments = command(3, BODIES / "faults/flipped_bit.py", "30", str(tmp_path / "marker"))
    with Listener(flipped) as listener:
        ended = run(arguments, 60, DLTRAIN_PLAN=write(plan, flipped), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Failed, 3)
    assert ended.code == EXIT_PARAMETERS_DIVERGED
    failures = [message.failure for message in listener.of(rank_messages.Failed)]
    assert {failure.reason for failure in failures} == {"ParametersDiverged"} and all(f.counts for f in failures)
    assert all("parameters of rank 1 differ from those of rank 0, 2" in failure.message for failure in failures)
    compared = {message.step: message.agree for message in listener.of(rank_messages.Compared)}
    assert compared[20] and next(step for step, agree in compared.items() if not agree) in range(30, 41)
    assert max(mark.mark.step for mark in listener.of(rank_messages.Checkpointed)) < 30
    assert run(arguments, 60, DLTRAIN_PLAN=write(plan, flipped)).code == EXIT_OK
    assert hashes(whole, 60) == hashes(flipped, 60)


@pytest.mark.parametrize(("rule", "low", "high"), [("Linear", 4, 4), ("SquareRoot", 2, 2), ("AdaScale", 1, 4)])
def test_learning_rate_scales_with_the_batch(rule: Any, low: float, high: float, tmp_path: Path) -> None:
    """All ranks use the same rate with uneven shares. Checkpoints contain the measurements."""
    steps, optimizer = 60, OptimizerRef(scaling=rule, base_batch=30)
    keep = saving(tmp_path, interval_s=1e-3, keep=100)
    plan = make_plan(2, shares=[80, 40], optimizer=optimizer, steps=steps, checkpoint=keep)
    with Listener(tmp_path) as listener:
        train(plan, tmp_path, DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 2)
    factors: dict[int, set[float]] = {}
    for message in listener.of(rank_messages.Step):
        assert message.learning_rate is not None
        factor = message.learning_rate / rate(optimizer.learning_rate, message.step - 1, steps)
        factors.setdefault(message.step, set()).add(round(factor, 9))
    assert all(len(found) == 1 for found in factors.values()), f"ranks use different rates: {factors}"
    assert all(low <= factor <= high for found in factors.values() for factor in found), factors
    if rule == "AdaScale":
        (first,), (last,) = factors[1], factors[steps]
        assert first == 2 and last not in (1, 2, 4), "from the square root of 4, before any measurement, to the gain"
        before = hashes(tmp_path, steps)
        for path in (tmp_path / "digits-0001").glob("step-*"):
            if int(path.name.removeprefix("step-")) > steps // 2:
                shutil.rmtree(path)
        assert list((tmp_path / "digits-0001").glob("step-*")), "a checkpoint to resume from remains"
        train(plan, tmp_path)
        assert hashes(tmp_path, steps) == before


@pytest.mark.parametrize("parallelism", ["Data", pytest.param("Optimizer", marks=pytest.mark.long)])
def test_found_learning_rate_trains_like_a_given_one(parallelism: Any, tmp_path: Path) -> None:
    searched, given = tmp_path / "searched", tmp_path / "given"
    for folder in (searched, given):
        folder.mkdir()
    # The sharded optimizer's search is by the accuracy, and the other one by the loss.
    by = "Accuracy" if parallelism == "Optimizer" else "Loss"
    search, steps = OptimizerRef(find_rate=True, learning_rate=1e-9, rate_curve=by), 60
    plan = make_plan(2, shares=[80, 40], optimizer=search, steps=steps, parallelism=parallelism)
    plan = plan.model_copy(update={"checkpoint": saving(searched)})
    train(plan, searched)
    curve = json.loads((searched / "digits-0001" / "learning-rate.json").read_text())
    assert curve["found"]["low"] < curve["rate"] < curve["found"]["high"]
    assert 1e-3 < curve["rate"] < 1 and len(curve["rates"]) == len(curve["losses"]) > 60
    assert curve["curve"] == by and max(curve["accuracies"]) > 0.7 and len(curve["accuracies"]) == len(curve["rates"])
    svg = ElementTree.parse(searched / "digits-0001" / "learning-rate.svg")
    assert any(f"learning rate {curve['rate']:.3g}" in (text.text or "") for text in svg.iter())
    known = OptimizerRef(learning_rate=curve["rate"])
    train(plan.model_copy(update={"optimizer": known, "checkpoint": saving(given)}), given)
    assert hashes(searched, steps) == hashes(given, steps), "the range test changed the training"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_five_line_script_trains(ranks: int, tmp_path: Path) -> None:
    script = SCRIPTS / "train_five_lines.py"
    arguments = [sys.executable, str(script)] if ranks == 1 else command(ranks, script, fresh=True)
    ended = run(arguments, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.output
    finished = re.search(r"finished 120 steps in .* s, accuracy (0\.\d+)", ended.output)
    assert finished is not None and float(finished[1]) > 0.9, ended.output


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_script_of_a_split_model_trains(ranks: int) -> None:
    """With one rank, the model is whole. Other tests compare the weights of more ranks with those of one process."""
    ended = run(command(ranks, SCRIPTS / "train_pipeline.py"), OMP_NUM_THREADS="1")
    finished = re.search(r"finished 120 steps in .* s, accuracy (0\.\d+)", ended.output)
    assert ended.code == 0 and finished is not None and float(finished[1]) > 0.95, ended.output


def test_float16_script_trains() -> None:
    ended = run(command(2, SCRIPTS / "train_float16.py"), OMP_NUM_THREADS="1")
    finished = re.search(r"finished 120 steps in .* s, accuracy (0\.\d+)", ended.output)
    assert ended.code == 0 and finished is not None and float(finished[1]) > 0.9, ended.output
