"""Tests of sharded datasets: what nodes fetch, what they read, and how they fail."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlcontract import DatasetRef, ModelRef
from dltrain.builtin import rank
from dltrain.data.datasets import load
from dltrain.data.sharded import block_sums
from dltrain.data.sharded.block_sums import BlockSums
from dltrain.data.sharded.dataset import ShardedArrays, ShardedDataset, ShardedTokens, decode, encode, open_sharded
from dltrain.protocol import rank_messages
from dltrain.protocol.errors import BadInputError, ShardError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_OK
from support.servers.files import FileServer
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, write
from support.trainer.ranks import BODIES, command, end, run_ranks, start
from support.trainer.sharded_files import BLOCK, TOKENS, impatient_server, publish, publish_text

SHARDED = BODIES / "training/data/sharded_ranks.py"
EPOCHS, BATCH = 4, 120


@pytest.fixture
def server() -> Iterator[FileServer]:
    with impatient_server() as found:
        yield found


@pytest.fixture
def digits(server: FileServer, tmp_path: Path) -> DatasetRef:
    path = tmp_path / "digits.npz"
    with np.load(Path(rank.__file__).parents[1] / "data/digits.npz") as arrays:
        np.savez(path, **arrays)
    return publish(server, path)


@pytest.fixture
def tokens(server: FileServer, tmp_path: Path) -> DatasetRef:
    return publish_text(server, tmp_path)


def opened(ref: DatasetRef, shares: tuple[int, ...] = (5, 3), number: int = 0) -> ShardedDataset:
    """Open the dataset as rank ``number`` of a plan with ``shares``."""
    assert ref.path is not None
    path = Path(ref.path)
    ref = ref.model_copy(update={"path": str(path.parent / f"pod-{number}" / path.name)})
    plan, data = make_plan(len(shares), shares=shares, global_batch=sum(shares), dataset=ref), open_sharded(ref)
    data.divide(plan, number, {}, lambda: shares)
    return data


def test_tokens_equal_those_of_the_whole_file(tokens: DatasetRef, tmp_path: Path) -> None:
    data, full = opened(tokens), load(DatasetRef(path=str(tmp_path / "text.npy")))
    assert isinstance(data, ShardedTokens) and data.sampler is not None
    assert (data.train_samples, data.test_samples) == (full.train_samples, full.test_samples) == (900, 100)
    part = data.sampler.part(3, (5, 3), 0)
    for mine, whole in (
        (data.train(part.indices), full.train(part.indices)),
        (data.test(np.arange(9)), full.test(np.arange(9))),
    ):
        assert all(bool((a == b).all()) for a, b in zip(mine, whole, strict=True))
    data.agree_on_classes(max(data.largest_target(), opened(tokens, number=1).largest_target()) + 1)
    assert data.shape == full.shape


def test_images_equal_those_of_the_whole_file(digits: DatasetRef, tmp_path: Path) -> None:
    data, full = opened(digits), load(DatasetRef(path=str(tmp_path / "digits.npz")))
    assert isinstance(data, ShardedArrays)
    assert (data.shape, data.scale, data.labels) == (full.shape, full.scale, full.labels)
    for mine, whole in (
        (data.train(np.arange(40)), full.train(np.arange(40))),
        (data.test(np.arange(9)), full.test(np.arange(9))),
    ):
        assert all(bool((a == b).all()) for a, b in zip(mine, whole, strict=True))


@pytest.mark.parametrize("name", ["tokens", "digits"])
def test_node_fetches_its_part_and_again_nothing(name: str, request: pytest.FixtureRequest, server: FileServer) -> None:
    ref = request.getfixturevalue(name)
    fetched, blocks = 0, 0
    for number in (0, 1):
        data = opened(ref, number=number)
        data.fetch_own()
        common = len(data._common_blocks()) + 2 * (name == "digits")  # ends of the zip file and of its members
        blocks = len(data.file.present)
        share = (5, 3)[number] / 8
        assert data.file.present.sum() <= share * blocks + common + 3, "its part, and a block at each end"
        fetched += int(data.file.present.sum())
        before = len(server.gets)
        again = opened(ref, number=number)
        assert again.held_shards(8) == data.own()
        again.fetch_own()
        assert again.file.fetched_nbytes == 0
        assert {path for path, _ in server.gets[before:]} <= {f"/{Path(str(ref.path)).name}.blocks"}
    assert fetched >= (0.9 if name == "tokens" else 1.0) * blocks, "together they have all training samples"


def test_blocks_without_checksums_are_fetched_too(server: FileServer, tmp_path: Path) -> None:
    data = opened(publish_text(server, tmp_path, sums=False))
    data.train(np.arange(5))
    assert data.file.block_nbytes == block_sums.BLOCK_NBYTES


def test_parts_that_linux_does_not_read_at_once_are_read_whole(
    tokens: DatasetRef, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call reads at most 2 GiB. Labels and held-out samples may be larger."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, nbytes, at: pread(file, min(nbytes, BLOCK), at))
    assert open_sharded(tokens).file.read(9, 4 * BLOCK) == server.files["/text.npy"][9 : 4 * BLOCK]


def test_dropped_connections_lose_at_most_a_block(tokens: DatasetRef, server: FileServer) -> None:
    data = opened(tokens)
    server.cuts = 3
    data.fetch_own()
    assert server.cuts == 0
    assert np.array_equal(
        np.array(data.train(data.own_samples(5))[0]), TOKENS[data.own_samples(5)[:, None] * 128 + np.arange(128)]
    )


def test_corrupt_shard_is_named(tokens: DatasetRef, server: FileServer) -> None:
    data = opened(tokens, number=1)
    content = bytearray(server.files["/text.npy"])
    content[700 * 256 + 130] ^= 1
    server.files["/text.npy"] = bytes(content)
    assert data.sampler is not None
    with pytest.raises(BadInputError, match="which changed during the training"):
        data.fetch_own()
    data = opened(tokens, number=1)  # a new job: the file was always like this
    with pytest.raises(
        BadInputError,
        match=r"spec\.dataset\.uri: found checksum .* of bytes \d+ to \d+ of .*text\.npy; expected .*It holds shards? \d.* of 8 \(samples \d+ to \d+\)",
    ):
        data.fetch_own()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda files: files.pop("/text.npy"), BadInputError, r"nothing at .*text\.npy.*It holds shards 0 to [45] of 8 \(samples \d+ to \d+\)"),
        (lambda files: files.update({"/text.npy": files["/text.npy"][:99_999]}), BadInputError, "which changed during the training.*It holds shard"),
    ],
    ids=["gone", "truncated"],
)  # fmt: skip
def test_missing_shard_is_named(
    spoil: Callable[[dict[str, bytes]], Any],
    error: type[Exception],
    message: str,
    tokens: DatasetRef,
    server: FileServer,
) -> None:
    data = opened(tokens)
    spoil(server.files)
    with pytest.raises(error, match=message):
        data.fetch_own()


def test_unavailable_shard_is_named_and_may_be_retried(tokens: DatasetRef, server: FileServer) -> None:
    data = opened(tokens)
    server.answers = [-503]
    with pytest.raises(ShardError, match=r"HTTP 503.*It holds shards 0 to [45] of 8"):
        data.fetch_own()
    server.answers = []
    data.fetch_own()


def test_wrong_checksum_of_the_checksums(tokens: DatasetRef) -> None:
    with pytest.raises(BadInputError, match=r"spec\.dataset\.sha256: found checksum [0-9a-f]+ of .*text\.npy\.blocks"):
        open_sharded(tokens.model_copy(update={"sha256": "0" * 64}))


@pytest.mark.parametrize(
    ("write_file", "message"),
    [
        (lambda path: np.savez_compressed(path, x=np.zeros((4, 2)), y=np.zeros(4, int), x_test=np.zeros((1, 2)), y_test=np.zeros(1, int)), "the compressed array x"),
        (lambda path: np.savez(path, x=np.zeros((4, 2))), "Add y, x_test, y_test"),
        (lambda path: np.savez(path, x=np.zeros((4, 2), int), y=np.zeros((4, 2), int), x_test=np.zeros((1, 2), int), y_test=np.zeros((1, 2), int)), "sequences of tokens"),
        (lambda path: path.write_bytes(b"no zip file"), r"save it with numpy\.savez|Save it with numpy\.savez"),
        (lambda path: np.savez(path, x=np.full((4, 2), np.nan), y=np.zeros(4, int), x_test=np.zeros((1, 2)), y_test=np.zeros(1, int)), r"not finite in shard \d of 4 \(samples"),
    ],
    ids=["compressed", "keys", "tokens", "format", "nan"],
)  # fmt: skip
def test_unusable_file_is_reported(
    write_file: Callable[[Path], Any], message: str, server: FileServer, tmp_path: Path
) -> None:
    path = tmp_path / "data.npz"
    write_file(path)
    with pytest.raises(BadInputError, match=message):
        data = opened(publish(server, path), (2, 2))
        data.train(data.own_samples(2))


def test_shards_that_moved_away_are_freed_when_space_is_short(tokens: DatasetRef, tmp_path: Path) -> None:
    shares: list[tuple[int, ...]] = [(4, 4)]
    ref = tokens.model_copy(update={"path": str(tmp_path / "small" / "text.npy"), "size_nbytes": 35 * BLOCK})
    data = open_sharded(ref)
    data.divide(make_plan(2, shares=(4, 4), global_batch=8, dataset=ref), 0, {}, lambda: shares[0])
    data.fetch_own()
    before = (tmp_path / "small/.dljob/shards.data").stat().st_blocks
    data.test(np.arange(50))
    shares[0] = (2, 6)
    x, _ = data.test(np.arange(50, 100))
    assert data.file.present.sum() <= 24, "half of the shards and the first held-out samples are freed"
    assert (tmp_path / "small/.dljob/shards.data").stat().st_blocks < before
    assert np.array_equal(x[0].numpy(), TOKENS[950 * 128 : 951 * 128])
    shares[0] = (8, 0)
    with pytest.raises(ShardError, match=r"spec\.dataset\.size: found 140\.0 KiB on this node; expected 22\d\.\d KiB"):
        data.fetch_own()


def test_nodes_with_different_versions_are_refused(tokens: DatasetRef, server: FileServer) -> None:
    first = opened(tokens)
    server.files["/text.npy"] = server.files["/text.npy"][:-2] + b"\x07\x00"
    second = opened(tokens, number=1)
    assert decode([encode(first, 8)], [0], "text.npy") == {0: first.held_shards(8)}
    with pytest.raises(BadInputError, match=r"different versions of text\.npy on different nodes"):
        decode([encode(first, 8), encode(second, 8)], [0, 1], "text.npy")


def test_block_sums_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.bin").write_bytes(TOKENS.tobytes())
    block_sums.main([str(tmp_path / "text.bin"), "--block-bytes", str(BLOCK)])
    content = (tmp_path / "text.bin.blocks").read_bytes()
    assert capsys.readouterr().out == f"{hashlib.sha256(content).hexdigest()}  text.bin.blocks\n"
    sums = BlockSums.parse(content.decode(), "spec.dataset.uri", "text.bin.blocks")
    assert (sums.nbytes, len(sums.sums)) == (TOKENS.nbytes, -(-TOKENS.nbytes // BLOCK))
    with pytest.raises(BadInputError, match="checksums of blocks"):
        BlockSums.parse("something else\n", "spec.dataset.uri", "text.bin.blocks")


def results(folder: Path, ranks: range) -> list[dict[str, Any]]:
    found = []
    for number in ranks:
        with np.load(folder / f"out-{number}.npz") as arrays:
            found.append(dict(arrays))
    return found


def trained(digits: DatasetRef, folder: Path, shares: tuple[int, ...]) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    plan = make_plan(len(shares), shares=shares, global_batch=BATCH, epochs=EPOCHS, dataset=digits)
    run_ranks(len(shares), SHARDED, str(folder), DLTRAIN_PLAN=write(plan, folder))
    return results(folder, range(len(shares)))


@pytest.mark.mpi
def test_ranks_with_their_own_shards_equal_one_process(digits: DatasetRef, tmp_path: Path) -> None:
    (alone,) = trained(digits, tmp_path / "alone", (BATCH,))
    parts = trained(digits, tmp_path / "ranks", (60, 36, 24))
    assert alone["accuracy"] > 0.6
    data = opened(digits, (BATCH,))
    training = data._blocks_of_shards(np.arange(BATCH), BATCH)
    common = data._common_blocks()
    for part in parts:
        assert np.abs(part["weights"] - alone["weights"]).max() < 1e-4
        assert abs(part["accuracy"] - alone["accuracy"]) < 0.01
        own = data._blocks_of_shards(part["home"], BATCH)
        assert set(np.flatnonzero(part["present"])) <= set(own) | set(common) | {0, len(part["present"]) - 1}
    last = set(np.flatnonzero(parts[2]["present"])) - set(common)
    assert len(last) <= len(training) / 5 + 3, "a node with a fifth of the batch has about a fifth of x"
    again = trained(digits, tmp_path / "ranks", (24, 36, 60))
    fetched = [int(part["fetched_nbytes"]) for part in again]
    assert fetched[0] == 0, "a node with a smaller part keeps what it needs"
    assert 0 < sum(fetched) <= (len(training) * 0.3 + 3) * BLOCK, "the others fetch the difference, and nothing else"


@pytest.mark.mpi
def test_accuracy_is_comparable_with_the_whole_dataset(digits: DatasetRef, tmp_path: Path) -> None:
    sharded, _ = trained(digits, tmp_path / "ranks", (70, 50))
    with Listener(tmp_path) as listener:
        plan = make_plan(2, shares=(70, 50), global_batch=BATCH, epochs=EPOCHS)
        run_ranks(
            2,
            BODIES / "training/moving_shares.py",
            "stay",
            DLTRAIN_PLAN=write(plan, tmp_path),
            DLTRAIN_SOCKET=listener.path,
        )
        listener.wait_for(rank_messages.Finished, 2)
        finished = listener.of(rank_messages.Finished)
    assert abs(float(sharded["accuracy"]) - (finished[0].outcome.accuracy or 0)) < 0.05


@pytest.mark.mpi
def test_survivors_take_over_the_shards_of_a_lost_rank(digits: DatasetRef, tmp_path: Path) -> None:
    (alone,) = trained(digits, tmp_path / "alone", (BATCH,))
    folder = tmp_path / "ranks"
    folder.mkdir()
    plan = make_plan(3, shares=(50, 40, 30), global_batch=BATCH, epochs=EPOCHS, dataset=digits)
    with Listener(tmp_path) as listener:
        arguments = command(3, SHARDED, str(folder), "1", "loss", "20", ulfm=True)
        process = start(arguments, DLTRAIN_PLAN=write(plan, folder), DLTRAIN_SOCKET=listener.path)
        listener.wait_for(rank_messages.Finished, 2)
        ended = end(process, 60)
    for number in (0, 2):
        with np.load(folder / f"out-{number}.npz") as part:
            assert np.abs(part["weights"] - alone["weights"]).max() < 1e-4, ended.output
            data = opened(digits, (BATCH,))
            assert set(data._blocks_of_shards(part["home"], BATCH)) < set(np.flatnonzero(part["present"]))


@pytest.mark.mpi
def test_corrupt_shard_ends_the_job_with_one_clear_error(
    digits: DatasetRef, server: FileServer, tmp_path: Path
) -> None:
    content = bytearray(server.files["/digits.npz"])
    content[60_000] ^= 1
    server.files["/digits.npz"] = bytes(content)
    plan = make_plan(2, shares=(60, 60), global_batch=BATCH, epochs=1, dataset=digits)
    with Listener(tmp_path) as listener:
        process = start(
            command(2, SHARDED, str(tmp_path)), DLTRAIN_PLAN=write(plan, tmp_path), DLTRAIN_SOCKET=listener.path
        )
        listener.wait_for(rank_messages.Failed, 1)
        end(process, 60)
        failed = listener.of(rank_messages.Failed)[0]
    assert failed.failure.exit_code == EXIT_BAD_INPUT and failed.failure.reason == "BadInput"
    assert "checksum" in failed.failure.message and "It holds shard" in failed.failure.message


def test_built_in_trainer_with_sharded_tokens(
    tokens: DatasetRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(1, global_batch=8, steps=2, model=ModelRef(name="gpt-mini"), dataset=tokens)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setenv(rank_messages.PLAN_ENV, write(plan, tmp_path))
    assert rank.main() == EXIT_OK


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("shards", None),
        ("other", "t.steps: found a loader of tuple with spec.dataset.distribution Sharded; expected t.loader"),
        ("held-out", "t.held_out: found the training samples of a sharded dataset"),
    ],
)
def test_script_trains_with_shards(argument: str, message: str | None, digits: DatasetRef, tmp_path: Path) -> None:
    plan = make_plan(2, shares=(70, 50), global_batch=BATCH, epochs=2, dataset=digits, model=ModelRef(command=("a",)))
    script = BODIES / "training/scripts/sharded_script.py"
    with Listener(tmp_path) as listener:
        env = {"DLTRAIN_PLAN": write(plan, tmp_path), "DLTRAIN_SOCKET": listener.path}
        process = start(command(2, script, argument), **env)
        listener.wait_for(
            rank_messages.Finished if message is None else rank_messages.Failed, 2 if message is None else 1
        )
        ended = end(process, 60)
    if message is None:
        assert (listener.of(rank_messages.Finished)[0].outcome.accuracy or 0) > 0.5, ended.output
    else:
        assert message in listener.of(rank_messages.Failed)[0].failure.message
