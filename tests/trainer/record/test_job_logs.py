"""Tests of the ranks' last output, packed for a ConfigMap: failed ranks first, and never beyond the limit."""

import gzip
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dltrain.record import job_logs
from dltrain.record.job_logs import RankOutput, packed


def text(seed: int, length: int) -> str:
    """Return text that hardly compresses."""
    return "".join(random.Random(seed).choices("0123456789abcdef", k=length))


def nbytes(files: dict[str, bytes]) -> int:
    return sum(4 * -(-len(data) // 3) for data in files.values())


def test_all_outputs_are_packed_if_they_fit() -> None:
    files = packed({1: RankOutput("one\n", failed=False), 0: RankOutput("zero\n", failed=False)})
    assert {name: gzip.decompress(data).decode() for name, data in files.items()} == {
        "rank-0.log.gz": "zero\n", "rank-1.log.gz": "one\n",
    }  # fmt: skip


def test_failed_ranks_come_first() -> None:
    outputs = {rank: RankOutput(text(rank, 4000), failed=rank == 7) for rank in range(9)}
    files = packed(outputs, 4000)
    assert next(iter(files)) == "rank-7.log.gz"
    assert gzip.decompress(files["rank-7.log.gz"]).decode() == outputs[7].text


def test_end_of_an_output_that_is_too_long_is_kept() -> None:
    whole = text(0, 30_000)
    (data,) = packed({0: RankOutput(whole, failed=True)}, 4000).values()
    kept = gzip.decompress(data).decode()
    assert 1000 < len(kept) < 30_000 and whole.endswith(kept)


def test_outputs_beyond_the_limit_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: each of thousands of outputs was compressed eight times, although nothing could fit any more."""
    compressed: list[int] = []

    def compress(data: bytes, mtime: float) -> bytes:
        compressed.append(len(data))
        return gzip.compress(data, mtime=mtime)

    monkeypatch.setattr(job_logs, "gzip", SimpleNamespace(compress=compress))
    long = RankOutput(text(0, 32_768), failed=False)
    files = packed(dict.fromkeys(range(5000), long), 100_000)
    assert 4 <= len(files) < 20 and len(compressed) < 50


def test_outputs_that_are_left_at_the_end_of_the_time_are_omitted() -> None:
    outputs = {rank: RankOutput("text\n", failed=False) for rank in range(9)}
    assert len(packed(outputs, within_s=60.0)) == 9 and packed(outputs, within_s=0.0) == {}


@given(
    st.dictionaries(st.integers(0, 50), st.builds(RankOutput, st.text(max_size=2000), st.booleans())),
    st.integers(0, 3000),
)
def test_limit_holds(outputs: dict[int, RankOutput], limit: int) -> None:
    files = packed(outputs, limit)
    assert nbytes(files) <= limit
    for name, data in files.items():
        rank = int(name.removeprefix("rank-").removesuffix(".log.gz"))
        assert outputs[rank].text.endswith(gzip.decompress(data).decode())
