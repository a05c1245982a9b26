"""Tests of the transfer of datasets and batches between processes and to devices."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dltrain.data.feeding import serialization
from dltrain.data.feeding.device_copy import DeviceCopier


def test_message_sent_before_close_is_received_despite_unread_messages() -> None:
    """An example is the failed transfer of a dataset while batches are already requested."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        with far:
            serialization.send(near, b"asked", None)
            serialization.send(far, b"failed", "why")
        assert serialization.receive(near) == (b"failed", "why")
        assert serialization.receive(near) is None


def test_packed_sequence_moves_to_the_device() -> None:
    """A packed sequence is a tuple whose batch sizes must stay on the CPU."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = DeviceCopier(torch.device("meta")).now({"x": packed})["x"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_memory_mapped_files_are_mapped_again_by_the_receiver(tmp_path: Path) -> None:
    """A copy could be larger than memory."""
    np.arange(10**6, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.int32, "r", offset=40)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = serialization.pack((tokens, tokens[5:7]))
        assert os.fstat(fd).st_size < 4096
        socket.send_fds(ours, [b"head"], [fd])
        os.close(fd)
        whole, part = (serialization.receive(theirs) or (b"", ()))[1]
    assert isinstance(whole, np.memmap) and np.array_equal(whole, tokens) and part.tolist() == [15, 16]


@pytest.mark.parametrize("offset", [0, 40])
def test_large_views_of_memory_mapped_files_are_mapped_again(offset: int, tmp_path: Path) -> None:
    """Scripts split a file into a training and a held-out part by slices. Strided views, and batches, are copied."""
    np.arange(2**20, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.int32, "r", offset=offset)
    train, held_out, odd = tokens[: 2**19], tokens[2**19 + 1 :], tokens[1::2]
    rows = train.reshape(-1, 128)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = serialization.pack((train, held_out, rows, odd), receivers=1)
        assert odd.nbytes < os.fstat(fd).st_size < odd.nbytes + 4096
        socket.send_fds(ours, [b"head"], [fd])
        os.close(fd)
        received = (serialization.receive(theirs) or (b"", ()))[1]
        serialization.send(ours, b"head", train)
        batch = (serialization.receive(theirs) or (b"", ()))[1]
    assert batch._mmap is None and batch.flags.writeable and np.array_equal(batch, train)
    for found, expected in zip(received, (train, held_out, rows, odd), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("content", [
    {"x": torch.arange(12).view(3, 4)[:, ::2], "flag": torch.tensor(True), "none": torch.empty(0, 3)},
    [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t(), torch.ones(1).expand(2, 3)],
    [torch.randn(3).bfloat16(), torch.randn(5, requires_grad=True).detach(), "text", 7, None],
    (np.arange(5.0), np.array([], np.int8), b"bytes", torch.ones(2, dtype=torch.complex64).conj()),
])  # fmt: skip
def test_serialization_round_trip(content: Any) -> None:
    """Received tensors are writable and remain valid after the connection is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        serialization.send(ours, b"head", content)
        found = serialization.receive(theirs)
        assert found is not None and found[0] == b"head"
        ours.close()
        assert serialization.receive(theirs) is None
    mine, other = (list(c.values()) if isinstance(c, dict) else list(c) for c in (found[1], content))
    for a, b in zip(mine, other, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
            assert a.stride() == torch.empty_like(b).stride() or 0 in b.stride()
            a.zero_()
        else:
            assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b
