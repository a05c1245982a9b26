"""Training on streams: epochs end on all ranks together, and a resumed run continues with the next samples."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dlcontract import CheckpointRef, DatasetRef
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.streams.loader import StreamLoader
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.rank_messages import Step
from dltrain.protocol.reporter import RankReporter
from dltrain.train.data_calls import held_out_batches
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import BODIES, command, run

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU, SHARES = torch.device("cpu"), (5, 3)


class Stopped(Exception):  # noqa: N818 - no error of the training
    """Ends a run in the middle of a step, as if the process were killed."""


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int = 23) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.samples):
            yield 100 * self.epoch + index, torch.rand(3)


class Stateful(Stream):
    index = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.index, self.samples):
            self.index = index + 1
            yield 100 * self.epoch + index, torch.rand(3)

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class Run:
    """One process that trains from the last checkpoint on."""

    def __init__(self, folder: Path, batch: int = 4, **plan: Any) -> None:
        plan = {"checkpoint": saving(folder, interval_s=1e-9, keep=100), "global_batch": batch} | plan
        plan = plan if "steps" in plan or "epochs" in plan else plan | {"epochs": 3}
        self.t = Trainer(make_plan(1, **plan), ProcessGroup(), RankReporter(None), CPU, "cpu")
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        self.model, self.opt = self.t.wrap(model, torch.optim.Adam(model.parameters(), 1e-2))
        self.began, self.rows = self.t.step, list[Any]()

    def train(self, dataset: Any, stop: int | None = None, finish: int | None = None, **options: Any) -> "Run":
        """Train up to the end, or until step ``stop``, whose samples are lost."""
        t, loader = self.t, self.t.loader(dataset, **options)
        with suppress(Stopped):
            for numbers, x in t.steps(loader, accumulate=t.plan.micro_batches > 1):
                t.checkpoint_manager.wait()  # so that the next step can save
                if t.step == stop:
                    raise Stopped
                self.rows.append((t.step, t.epoch, t.end_of_epoch, numbers.tolist(), x.tolist()))
                (self.model(x)[:, 0] - numbers).square().mean().backward()
                if t.step == finish:
                    t.finish()
                self.opt.step()
                if t.end_of_step:
                    self.opt.zero_grad()
        t.close()
        return self

    @property
    def weights(self) -> list[float]:
        return [*self.model.weight[0].tolist(), *self.model.bias.tolist()]


@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_continues_with_the_next_samples(kind: type[Stream], workers: int, tmp_path: Path) -> None:
    """Of 23 samples, a rank makes 5 batches of 4; two workers repeat the stream, because it is not divided."""
    whole = Run(tmp_path / "whole").train(kind(), workers=workers)
    length = 5 if not workers else 11
    assert [row[0] for row in whole.rows] == list(range(3 * length)) and whole.t.total_steps == 3 * length
    assert [row[1] for row in whole.rows] == [e for e in range(3) for _ in range(length)]
    assert [row[0] for row in whole.rows if row[2]] == [length * e - 1 for e in (1, 2, 3)]
    if not workers:
        assert [n for row in whole.rows for n in row[3]] == [100 * e + i for e in range(3) for i in range(20)]
    for stop in range(2, 3 * length) if not workers else (3, length + 2):
        folder = tmp_path / f"{stop}"
        first = Run(folder).train(kind(), stop, workers=workers)
        second = Run(folder).train(kind(), workers=workers)
        assert (second.began, second.weights) == (second.rows[0][0], whole.weights) and 0 < second.began <= stop
        assert [row for row in first.rows if row[0] < second.began] + second.rows == whole.rows


def test_steps_continue_over_epochs_and_may_be_extended(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", steps=13).train(Stream())
    assert [row[1] for row in whole.rows] == [0] * 5 + [1] * 5 + [2] * 3 and whole.t.complete
    first = Run(tmp_path / "parts", steps=7).train(Stream())
    second = Run(tmp_path / "parts", steps=13).train(Stream())
    assert first.rows + second.rows == whole.rows and second.weights == whole.weights
    done = Run(tmp_path / "parts", steps=13).train(Stream())
    assert not done.rows and done.t.complete


def test_epochs_may_be_extended_and_a_complete_run_does_nothing(tmp_path: Path) -> None:
    first = Run(tmp_path, epochs=1).train(Stream())
    assert first.t.complete and first.t.total_steps == 5
    again = Run(tmp_path, epochs=1).train(Stream())
    assert not again.rows and again.t.complete
    more = Run(tmp_path, epochs=2).train(Stream())
    assert [row[:2] for row in more.rows] == [(step, 1) for step in range(5, 10)]


def test_finish_ends_an_epoch_of_unknown_length(tmp_path: Path) -> None:
    first = Run(tmp_path).train(Stream(), finish=7)
    assert len(first.rows) == 8 and first.t.complete
    assert not Run(tmp_path).train(Stream()).rows


def test_micro_batches_are_parts_of_the_batch(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", batch=6).train(Stream())
    run = Run(tmp_path / "parts", batch=6, micro_batches=3).train(Stream(), stop=4)
    assert len(run.rows) == 12 and all(len(row[3]) == 2 for row in run.rows)
    assert [n for row in run.rows for n in row[3]] == [n for row in whole.rows[:4] for n in row[3]]
    assert [row[0] for row in run.rows if row[2]] == [2]
    rest = Run(tmp_path / "parts", batch=6, micro_batches=3).train(Stream())
    before = [row for row in run.rows if row[0] < rest.began]
    assert [n for row in before + rest.rows for n in row[3]] == [n for row in whole.rows for n in row[3]]


def test_data_loader_of_a_stream(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor([n for n, _ in samples]), torch.stack([x + torch.rand(()) for _, x in samples])

    whole = Run(tmp_path / "whole").train(DataLoader(Stream(), batch_size=4, collate_fn=collate))
    assert not torch.equal(torch.tensor(whole.rows[0][4]), torch.tensor(Run(tmp_path / "x").train(Stream()).rows[0][4]))
    first = Run(tmp_path / "parts", steps=7).train(DataLoader(Stream(), collate_fn=collate))
    second = Run(tmp_path / "parts").train(DataLoader(Stream(), collate_fn=collate))
    assert first.rows + second.rows == whole.rows, "random numbers of collate_fn continue, too"


def test_stream_without_a_complete_batch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"no complete batch in the stream of rank 0 in epoch 0; expected at least 4"):
        Run(tmp_path).train(Stream(3))


def test_larger_local_batch_at_the_end_of_an_epoch_begins_the_next(tmp_path: Path) -> None:
    """A resumed run may have other local batch sizes, and the samples that are left may not fill a batch of them."""
    run = Run(tmp_path)
    run.t._streams.load([[0, 2, 0, 0, [], [[20, [None, None]]]]])
    assert [row[:2] for row in run.train(Stream()).rows] == [(step, 1 + step // 5) for step in range(10)]


def test_dataset_of_another_kind_than_in_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    data = [(i, torch.zeros(3)) for i in range(20)]
    Run(tmp_path / "stream").train(Stream(), stop=3)
    with pytest.raises(BadInputError, match=r"^dataset: found a dataset with len and \[\]; expected a stream, as in"):
        Run(tmp_path / "stream").train(data)
    Run(tmp_path / "indexed").train(data, stop=3)
    with pytest.raises(BadInputError, match=r"^dataset: found Stream, a stream; expected a dataset with len and \[\]"):
        Run(tmp_path / "indexed").train(Stream())


def test_another_number_of_workers_is_an_error_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    Run(tmp_path).train(Stream(), stop=3)
    with pytest.raises(
        BadInputError, match=r"^workers: found 2; expected 1 in the middle of an epoch, as in the check"
    ):
        Run(tmp_path).train(Stream(), workers=2)
    Run(tmp_path, steps=5).train(Stream(), workers=1)
    assert Run(tmp_path).train(Stream(), workers=2).rows[0][0] == 5, "epochs may begin with another number"


@pytest.mark.parametrize(
    ("inside", "message"), [(True, "number of ranks: found 1; expected 2 in the mid"), (False, "")]
)
def test_positions_of_another_number_of_ranks(inside: bool, message: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    place = [[3, [None, None]]]
    run.t._streams.load([[2, 4, 0, 0, [], place if inside else []]] * 2)
    run.t.step = 9
    loader = run.t.loader(Stream())
    assert isinstance(loader, StreamLoader)
    if message:
        with pytest.raises(BadInputError, match=message):
            run.t._streams.open(loader, 9)
    else:
        assert run.t._streams.open(loader, 9).position.epoch == 2
    run.t.close()


def test_parameter_server_instead_of_a_worker_is_an_error_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Fixed bug: the samples that the former worker had not read were left out, without an error."""
    run = Run(tmp_path)
    served = make_plan(shares=(4, 0), global_batch=4, collective="ParameterServer", checkpoint=saving(tmp_path))
    run.t._team.plan = served
    run.t._team.size = 2
    run.t._streams.load([[0, 4, 0, 0, [], [[3, [None, None]]]]] * 2)
    loader = run.t.loader(Stream())
    assert isinstance(loader, StreamLoader)
    with pytest.raises(BadInputError, match="ranks that read the stream: found 0; expected 0, 1 in the middle of an e"):
        run.t._streams.open(loader, 9)
    run.t.close()


@pytest.mark.parametrize("saves", [True, False])
def test_progress_says_to_how_many_ranks_a_stream_binds_the_training(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[Any]()
    monkeypatch.setattr(RankReporter, "send", lambda reporter, message: sent.append(message))
    Run(tmp_path / "stream", **({} if saves else {"checkpoint": CheckpointRef(enabled=False)})).train(Stream())
    updates = [message for message in sent if isinstance(message, Step)]
    assert len(updates) >= 3 and {each.bound_ranks for each in updates} == {1 if saves else None}
    sent.clear()
    Run(tmp_path / "indexed").train([(i, torch.zeros(3)) for i in range(20)])
    assert {each.bound_ranks for each in sent if isinstance(each, Step)} == {None}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"parallelism": "Tensor"},
            "found Stream, a stream, with parallelism.strategy Tensor; expected a dataset with",
        ),
        (
            {"dataset": DatasetRef(path="/x", distribution="Sharded", uri="s3://bucket/x")},
            "found Stream, a stream, with dataset.distribution Sharded; expected a dataset with",
        ),
    ],
)
def test_plans_that_do_not_support_streams_are_errors(plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.t._team.plan = run.t.plan.model_copy(update=plan)
    with pytest.raises(MisuseError, match=message):
        run.train(Stream())


def test_held_out_stream_is_read_once_on_each_rank() -> None:
    plan = make_plan(shares=SHARES, global_batch=8)
    trainer = Trainer(make_plan(1, global_batch=8), ProcessGroup(), RankReporter(None), CPU, "cpu")
    loader = trainer.loader(Stream())
    for rank, share in enumerate(SHARES):
        found = [numbers.tolist() for numbers, _ in held_out_batches(loader, SHARES, rank, plan)]
        assert [n for batch in found for n in batch] == list(range(23)), "with the last, incomplete batch"
        assert max(map(len, found)) == share
    for strategy in ("Tensor", "Sharded"):
        split = plan.model_copy(update={"parallelism": strategy})
        with pytest.raises(MisuseError, match=r"t\.held_out: found Stream, a stream, with parallelism"):
            next(held_out_batches(loader, SHARES, 0, split))
    trainer.close()


def rows_of(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]


def streams(folder: Path, kind: str, workers: int, killed: int = -1, **plan: Any) -> tuple[list[str], str]:
    """Return the command of two ranks of the script, and the path of their plan."""
    folder.mkdir(exist_ok=True)
    made = make_plan(
        shares=SHARES,
        global_batch=8,
        checkpoint=saving(folder / "checkpoints", interval_s=1e-9, keep=2),
        **({"epochs": 3} | plan),
    )
    script = BODIES / "training/data/streams.py"
    return command(2, script, kind, str(workers), str(killed), folder), write(made, folder)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["counted", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_ranks_continue_their_streams_bit_for_bit(kind: str, workers: int, tmp_path: Path) -> None:
    """Rank 0 has 30 samples in each epoch, for 6 steps. Rank 1 has as many, and leaves 12 of them out."""
    arguments, plan = streams(tmp_path / "whole", kind, workers)
    whole = run(arguments, DLTRAIN_PLAN=plan)
    assert whole.code == 0, whole.output
    expected = [rows_of(tmp_path / "whole", rank) for rank in range(2)]
    for rank, rows in enumerate(expected):
        assert [row[0] for row in rows] == list(range(18)) and {len(row[3]) for row in rows} == {SHARES[rank]}
        assert [row[1] for row in rows] == [epoch for epoch in range(3) for _ in range(6)]
        assert [row[0] for row in rows if row[2]] == [5, 11, 17]
    for epoch in range(3):
        numbers = [n for rows in expected for row in rows[6 * epoch : 6 * epoch + 6] for n in row[3]]
        assert len(set(numbers)) == 48, "ranks and workers read different samples"
    assert len({tuple(n for row in expected[0][6 * e : 6 * e + 6] for n in row[3]) for e in range(3)}) == 3

    arguments, plan = streams(tmp_path / "parts", kind, workers, killed=9)
    killed = run(arguments, DLTRAIN_PLAN=plan)
    assert killed.code != 0
    before = [rows_of(tmp_path / "parts", rank) for rank in range(2)]
    assert [rows == expected[rank][: len(rows)] for rank, rows in enumerate(before)] == [True, True]
    assert len(before[1]) == 9
    for rank in range(2):
        (tmp_path / f"parts/rank-{rank}").unlink()
    arguments, plan = streams(tmp_path / "parts", kind, workers)
    resumed = run(arguments, DLTRAIN_PLAN=plan)
    assert resumed.code == 0, resumed.output
    found = re.search(r"resumed from step (\d+) ", resumed.output)
    assert found is not None and int(found[1]) in (7, 8, 9), resumed.output
    for rank in range(2):
        assert rows_of(tmp_path / "parts", rank) == expected[rank][int(found[1]) :]
        whole_parameters = (tmp_path / f"whole/parameters-{rank}").read_text()
        assert (tmp_path / f"parts/parameters-{rank}").read_text() == whole_parameters


@pytest.mark.mpi
def test_equal_streams_are_a_warning_and_other_ranks_an_error(tmp_path: Path) -> None:
    arguments, plan = streams(tmp_path, "same", 0, steps=4, epochs=None)
    ended = run(arguments, DLTRAIN_PLAN=plan)
    assert ended.code == 0 and ended.output.count("found the same first samples in the streams of") == 1, ended.output
    three = make_plan(
        shares=(4, 2, 2), global_batch=8, steps=9, checkpoint=saving(tmp_path / "checkpoints", interval_s=1e-9)
    )
    arguments = command(3, BODIES / "training/data/streams.py", "same", "0", "-1", tmp_path)
    more = run(arguments, DLTRAIN_PLAN=write(three, tmp_path))
    assert more.code != 0 and "number of ranks: found 3; expected 2 in the middle of an epoch" in more.output


@pytest.mark.mpi
def test_streams_train_with_accumulated_gradients_on_ranks(tmp_path: Path) -> None:
    arguments, plan = streams(tmp_path, "counted", 0, micro_batches=2)
    ended = run(arguments, DLTRAIN_PLAN=plan)
    assert ended.code == 0, ended.output
    for rank in range(2):
        rows = rows_of(tmp_path, rank)
        assert [row[0] for row in rows] == [step for step in range(18) for _ in range(2)]
        assert [row[0] for row in rows if row[2]] == [5, 11, 17], "in the last micro-batch"
