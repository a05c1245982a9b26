"""Tests of replay: a run can repeat the shares that the report of another run records."""

from pathlib import Path

import pytest

from dlcontract import RunPhase
from dltrain.checkpoint.store import MODEL, OPTIMIZER
from dltrain.protocol import rank_messages
from dltrain.protocol.errors import BadInputError
from dltrain.record.run_report import files
from dltrain.record.run_report.document import Document, Split, Totals
from dltrain.record.run_report.history import History
from dltrain.train.replay import REPLAY_ENV, asked, timeline
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import BODIES, run_ranks


def document(*splits: tuple[int, dict[str, int]], count: int | None = None) -> Document:
    return Document(
        job="j", namespace="n", uid="u", model="mlp", dataset="digits", global_batch=12, seed=0, term=1,
        phase=RunPhase.RUNNING, started_unix_s=0.0, updated_unix_s=0.0, totals=Totals(splits=count or len(splits)),
        splits=tuple(Split(step=step, unix_s=0.0, shares=shares, reason="") for step, shares in splits),
    )  # fmt: skip


def test_repeated_steps_use_their_last_shares() -> None:
    even, uneven, without = {"a/0": 6, "b/0": 6}, {"a/0": 8, "b/0": 4}, {"b/0": 12}
    recorded = document((0, even), (50, uneven), (100, even), (80, uneven), (90, without), (95, even))
    assert timeline(recorded) == ((0, (6, 6)), (50, (8, 4)), (80, (8, 4)), (90, (0, 12)), (95, (6, 6)))
    with pytest.raises(ValueError, match="found 1 of 2 changes"):
        timeline(document((0, even), count=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        (b"{}", "validation error"),
        (document((0, {"a/0": 12})).to_json().encode(), "of a run with global batch 12, seed 0, ranks 1; expected"),
        (document().to_json().encode(), "of a run with global batch 12, seed 0, ranks 0; expected global batch 120"),
    ],
    ids=["missing", "no report", "another run", "no split"],
)
def test_report_that_cannot_be_replayed_is_rejected(
    text: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_bytes(text)
    monkeypatch.setenv(REPLAY_ENV, str(path))
    with pytest.raises(BadInputError, match=message):
        asked(make_plan(2))


@pytest.mark.mpi
def test_replay_of_a_rebalanced_run_is_bit_identical(tmp_path: Path) -> None:
    """The replay reads only the report. Its ranks neither rebalance nor choose an all-reduce algorithm."""
    bits: dict[str, list[bytes]] = {}
    picks: dict[str, set[tuple[int, str, int]]] = {}
    report = tmp_path / "report.json"
    for name in ("move", "replay", "even"):
        folder = tmp_path / name
        folder.mkdir()
        plan = make_plan(2, steps=30, measure_collective=True, checkpoint=saving(folder))
        env = {REPLAY_ENV: str(report)} if name == "replay" else {}
        with Listener(folder) as listener:
            paths = {"DLTRAIN_PLAN": write(plan, folder), "DLTRAIN_SOCKET": listener.path}
            run_ranks(2, BODIES / "training/moving_shares.py", name, **paths, **env)
            listener.wait_for(rank_messages.Finished, 2)
        if name == "move":
            history = History(plan, 0.0)
            history.begin_attempt(plan, plan, 0.0)
            for message in listener.messages:
                history.record(message, 0, 0.0)
            files.write(tmp_path, files.rendered(history.document(RunPhase.SUCCEEDED, 1, 0.0)))
        path = folder / "digits-0001" / "step-0000000030"
        bits[name] = [(path / file).read_bytes() for file in (MODEL, OPTIMIZER)]
        chosen = [each for message in listener.of(rank_messages.Chosen) for each in message.sums]
        picks[name] = {(each.nbytes, each.strategy, each.segment_nbytes) for each in chosen}
    moved = [(split.step, tuple(split.shares.values())) for split in Document.parse(report.read_bytes()).splits]
    assert moved[-2:] == [(5, (90, 30)), (20, (40, 80))]
    assert picks["move"] == picks["replay"] and bits["move"] == bits["replay"]
    assert bits["even"] != bits["move"], "other shares must change rounding, otherwise the test shows nothing"
