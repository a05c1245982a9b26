"""Objects between a rank and its workers: tensors and arrays in memory that both map, copied once.

A message is a few bytes on a socket, and with it a descriptor of anonymous memory (memfd_create(2)). It counts as the
container's memory and is gone with its last user. /dev/shm, where torch's own processes put tensors, is as small as the
pod makes it, and a process that writes beyond it dies of SIGBUS.

Objects go by cloudpickle: what the script itself defines (a class of datasets, a lambda) goes by value, so that a
worker need not run the script again.
"""

import io
import mmap
import os
import pickle
import select
import socket
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64
_MOST_AT_ONCE = 2**30
"""Bytes of one write(2), which takes less than 2^31."""


class Readable(Protocol):
    def fileno(self) -> int: ...


def wait_for(*connections: Readable, within_s: float | None = None) -> bool:
    """Until one of them can be read without waiting, or is at its end; whether that came within the time."""
    poll = select.poll()  # select(2) takes no descriptor above 1023
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if within_s is None else 1e3 * within_s))


def send(connection: socket.socket, head: bytes, content: Any) -> None:
    """``head`` (a few bytes) and any object. Raises OSError when nobody listens, and what pickling raises."""
    fd = pack(content)
    try:
        socket.send_fds(connection, [head], [fd])
    finally:
        os.close(fd)


def pack(content: Any, room_nbytes: int | None = None, receivers: int = 0) -> int:
    """The object in memory, by a descriptor that may go to any number of processes.

    ``room_nbytes``: what this and what becomes of it at ``receivers`` may take. Raises MemoryError where that is more,
    and what pickling raises.
    """
    fd = os.memfd_create("dltrain")
    try:
        _write(fd, content, room_nbytes, receivers)
    except BaseException:
        os.close(fd)
        raise
    return fd


def receive(connection: socket.socket) -> tuple[bytes, Any] | None:
    """The next head and object, None at the end of the connection. Raises what unpickling raises."""
    for _ in range(2):
        try:
            head, fds, _, _ = socket.recv_fds(connection, 64, 1)
            break
        except ConnectionError:
            head = b""  # the other end closed with messages unread, which is told, once, before what it sent
    if not head:
        return None
    (fd,) = fds
    try:
        return head, _read(fd)
    finally:
        os.close(fd)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # which has no types
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.memmap and _of_a_file(obj):  # perhaps larger than memory: mapped there, too
            layout, mode = "C" if obj.flags.c_contiguous else "F", "r" if obj.mode == "r" else "r+"
            return _mapped, (str(obj.filename), obj.dtype, mode, obj.offset, obj.shape, layout)
        plain = type(obj) is Tensor and obj.device.type == "cpu" and obj.layout is torch.strided and obj.numel()
        if plain and not (obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg()):
            # Dimensions stay in their order in memory (channels_last): kernels, and so the last bits, depend on it.
            order = list(range(obj.dim()))
            if not obj.is_contiguous() and 0 not in obj.stride():
                order.sort(key=obj.stride, reverse=True)
            dense = obj.permute(order).contiguous()
            flat = dense.view(-1).view(torch.uint8).numpy()
            back = [order.index(dimension) for dimension in range(obj.dim())]
            return _tensor, (pickle.PickleBuffer(flat), obj.dtype, tuple(dense.shape), back)
        return super().reducer_override(obj)


def _of_a_file(array: Any) -> bool:
    """Whether a numpy.memmap holds what is in its file; not so a part of one, or one with changes of its own."""
    whole = isinstance(array.base, mmap.mmap) and array.mode in ("r", "r+", "w+")
    return whole and array.filename is not None and Path(array.filename).exists()


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], back: list[int]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).permute(back)


def _mapped(name: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], layout: Any) -> Any:
    return np.memmap(name, dtype, mode, offset, shape, layout)


def _write(fd: int, content: Any, room_nbytes: int | None, receivers: int) -> None:
    """In the file: how many parts, the length of each, then the parts (a pickle, its buffers) at multiples of 64."""
    buffers: list[pickle.PickleBuffer] = []
    skeleton = io.BytesIO()
    _Pickler(skeleton, protocol=5, buffer_callback=buffers.append).dump(content)
    parts = [skeleton.getbuffer(), *(buffer.raw() for buffer in buffers)]
    needed = sum(part.nbytes for part in parts) + receivers * parts[0].nbytes  # buffers are shared, objects are not
    if room_nbytes is not None and needed > room_nbytes:
        raise MemoryError(f"found {needed / 2**20:.0f} MiB to send, expected at most {room_nbytes / 2**20:.0f} MiB")
    lengths = np.array([len(parts), *(part.nbytes for part in parts)], np.int64).tobytes()
    _put(fd, memoryview(lengths), 0)
    at = len(lengths)
    for part in parts:
        at = _aligned(at)
        _put(fd, part, at)
        at += part.nbytes


def _put(fd: int, part: memoryview, at: int) -> None:
    while part.nbytes:
        done = os.pwrite(fd, part[:_MOST_AT_ONCE], at)
        part, at = part[done:], at + done


def _read(fd: int) -> Any:
    size = os.fstat(fd).st_size
    # Torch's own map of the file keeps no descriptor open, as Python's does; a batch may live long. What is written to
    # it stays here.
    whole = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8).numpy()
    count = int(whole[:8].view(np.int64)[0])
    at, parts = 8 * (count + 1), []
    for length in whole[8:at].view(np.int64).tolist():
        at = _aligned(at)
        parts.append(whole[at : at + length])
        at += length
    return pickle.loads(parts[0].data, buffers=parts[1:])


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
