"""Tests of real ranks that are killed and resume from an object store."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from dlcontract import CheckpointRef, Plan
from dltrain.checkpoint.remote_store import RemoteCheckpoints
from dltrain.checkpoint.store import MODEL, Snapshot
from dltrain.object_store.client import ObjectStore
from dltrain.protocol import rank_messages
from dltrain.protocol.volume_layout import checkpoint_place
from support.trainer.listener import Listener
from support.trainer.object_store import Server
from support.trainer.plans import make_plan, write
from support.trainer.ranks import BODIES, command, end, run, run_ranks, start

pytestmark = pytest.mark.mpi
FROZEN_BASE = BODIES / "training/frozen_base.py"


def plan_at(folder: Path, prefix: str, ranks: int, **changes: Any) -> Plan:
    checkpoint = CheckpointRef(directory=str(folder / "disk"), uri=f"s3://models/{prefix}", interval_s=0.2)
    return make_plan(ranks, checkpoint=checkpoint, steps=300, **changes)


def last_state(plan: Plan, folder: Path) -> Snapshot:
    store = ObjectStore(checkpoint_place(plan))
    identity = next(iter(entry.about["identity"] for entry in RemoteCheckpoints(store, "", 1, folder, 0).log.commits()))
    found = RemoteCheckpoints(store, identity, 1, folder, 0).load()
    assert found is not None
    return found.snapshot()


def killed_and_resumed(plan: Plan, folder: Path, environ: dict[str, str]) -> str:
    ranks = len(plan.ranks)
    folder.mkdir()
    with Listener(folder) as listener:
        environment: dict[str, Any] = {
            "DLTRAIN_PLAN": write(plan, folder), "DLTRAIN_SOCKET": listener.path, **environ,
        }  # fmt: skip
        process = start(command(ranks, "-m", "dltrain.builtin.rank"), **environment)
        listener.wait_for(rank_messages.Checkpointed, 1)
        for hello in listener.of(rank_messages.Hello):
            os.kill(hello.pid, signal.SIGKILL)
        assert end(process, 60).code != 0
        again = run_ranks(ranks, "-m", "dltrain.builtin.rank", **environment)
        listener.wait_for(rank_messages.Finished, ranks)
    return again.output


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        pytest.param(3, {"parallelism": "Optimizer"}, marks=pytest.mark.long),
        pytest.param(4, {}, marks=pytest.mark.long),
    ],
)
def test_killed_training_ends_with_the_same_bits(
    store: Server, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    plan = plan_at(tmp_path, "killed", ranks, **changes)
    output = killed_and_resumed(plan, tmp_path / "killed", store.environ())
    found = re.search(r"resumed from step (\d+) in s3://models/killed/digits-0001/data/t0000000001-", output)
    assert found is not None and 0 < int(found[1]) < 300, output
    whole = plan_at(tmp_path, "whole", ranks, **changes)
    (tmp_path / "whole").mkdir()
    run_ranks(ranks, "-m", "dltrain.builtin.rank", DLTRAIN_PLAN=write(whole, tmp_path / "whole"), **store.environ())
    one, other = last_state(plan, tmp_path / "a"), last_state(whole, tmp_path / "b")
    assert one.step == other.step == plan.steps
    for mine, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    beside = ObjectStore(checkpoint_place(whole))
    assert b'"mlp"' in beside.read("model.json") and b"python predict.py" in beside.read("predict.py")
    assert not list((tmp_path / "disk").rglob("*.safetensors")), "the local copy was deleted"


@pytest.mark.parametrize("strategy", ["Data", pytest.param("Sharded", marks=pytest.mark.long)])
def test_killed_training_resumes_without_frozen_parameters_in_the_store(
    store: Server, tmp_path: Path, strategy: str
) -> None:
    arguments = ("2", tmp_path / "disk", strategy, "s3://models/frozen")
    assert run(command(2, FROZEN_BASE, *arguments, "kill"), 120, **store.environ()).code != 0
    output = run_ranks(2, FROZEN_BASE, *arguments, **store.environ()).output
    assert re.search(r"resumed from step [1-5] in s3://models/frozen/", output), output
    whole = run_ranks(2, FROZEN_BASE, "2", tmp_path / "whole", strategy).output
    assert re.findall(r"model [0-9a-f]{64}", output) == re.findall(r"model [0-9a-f]{64}", whole) != []
    key, nbytes, _ = store.last_commit("models", "frozen/")["files"][MODEL]
    content = store.client().get_object(Bucket="models", Key=f"frozen/digits-0001/{key}")["Body"].read()
    names = load(content).keys()
    assert len(content) == nbytes and "0.up.weight" in names and not [name for name in names if "base" in name]
