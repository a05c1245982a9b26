"""Transfer of objects between a rank and its workers through shared memory. Tensors and arrays are copied only once.

A message consists of a few bytes on a socket and a descriptor of anonymous memory (memfd_create(2)). This memory counts
towards the container's memory limit, and the kernel frees it when no process uses it any more. torch's own workers use
/dev/shm instead, whose size the pod limits, and SIGBUS kills a process that writes beyond this limit.

Objects are serialized by cloudpickle, which sends definitions in the script (a dataset class, a lambda) by value.
Workers therefore need not run the script.
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
_MAPPED_NBYTES = 2**20
"""Minimum size of a view of a memory-mapped file from which the receiver maps the file again instead of a copy.

A process may have some 65,000 mappings, and a dataset may consist of many small views.
"""
_WRITE_NBYTES = 2**30
"""Maximum number of bytes per write(2). The system call accepts less than 2^31."""


class Readable(Protocol):
    def fileno(self) -> int: ...


def wait_for(*connections: Readable, within_s: float | None = None) -> bool:
    """Wait until a connection is readable or closed. Return False if ``within_s`` seconds pass before that.

    If ``within_s`` is None, wait without a limit.
    """
    poll = select.poll()  # select(2) supports no descriptor above 1023
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if within_s is None else 1e3 * within_s))


def send(connection: socket.socket, head: bytes, content: Any, *, in_main_memory: bool = False) -> None:
    """Send ``head`` (a few bytes) and the object ``content``. ``in_main_memory``: see ``pack``.

    Raise OSError if the connection is closed, DeviceTensorError, and any error of pickling the object.
    """
    fd = pack(content, in_main_memory=in_main_memory)
    try:
        socket.send_fds(connection, [head], [fd])
    finally:
        os.close(fd)


class DeviceTensorError(Exception):
    """The object has a tensor that is not in main memory."""


def pack(content: Any, room_nbytes: int | None = None, receivers: int = 0, *, in_main_memory: bool = False) -> int:
    """Serialize an object into shared memory. Return a descriptor that can be sent to any number of processes.

    ``room_nbytes``: limit on the memory of the serialized object and its copies in ``receivers`` processes; None: no
    limit. ``in_main_memory``: True to refuse tensors on other devices. Raise MemoryError above the limit,
    DeviceTensorError for such a tensor, and any error of pickling the object.
    """
    fd = os.memfd_create("dltrain")
    try:
        _write(fd, content, room_nbytes, receivers, in_main_memory=in_main_memory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def receive(connection: socket.socket) -> tuple[bytes, Any] | None:
    """Return the head (a few bytes) and the object of the next message, or None at the end of the connection.

    Raise any error of unpickling the object.
    """
    for _ in range(2):
        try:
            head, fds, _, _ = socket.recv_fds(connection, 64, 1)
            break
        except ConnectionError:
            head = b""  # The peer closed with unread messages. Its own data can still be read after this error.
    if not head:
        return None
    (fd,) = fds
    try:
        return head, _read(fd)
    finally:
        os.close(fd)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    maps_views = False
    """True to map the file of a large view of a numpy.memmap again. Otherwise the view is copied."""
    in_main_memory = False
    """True to refuse tensors on other devices."""

    def reducer_override(self, obj: Any) -> Any:
        if self.in_main_memory and isinstance(obj, Tensor) and obj.device.type != "cpu":
            raise DeviceTensorError(f"found a tensor on {obj.device}")
        # A mapped file may be larger than the memory, so the receiver maps it again.
        if type(obj) is np.memmap and _of_a_file(obj, views=self.maps_views):
            layout, mode = "C" if obj.flags.c_contiguous else "F", "r" if obj.mode == "r" else "r+"
            return _mapped, (str(obj.filename), obj.dtype, mode, _position(obj), obj.shape, layout)
        plain = type(obj) is Tensor and obj.device.type == "cpu" and obj.layout is torch.strided and obj.numel()
        if plain and not (obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg()):
            # Preserve the memory format (such as channels_last). The choice of kernels, and therefore the last bits of
            # results, depend on it.
            order = list(range(obj.dim()))
            if not obj.is_contiguous() and 0 not in obj.stride():
                order.sort(key=obj.stride, reverse=True)
            dense = obj.permute(order).contiguous()
            flat = dense.view(-1).view(torch.uint8).numpy()
            back = [order.index(dimension) for dimension in range(obj.dim())]
            return _tensor, (pickle.PickleBuffer(flat), obj.dtype, tuple(dense.shape), back)
        return super().reducer_override(obj)


def _of_a_file(array: Any, *, views: bool) -> bool:
    """Return True if a numpy.memmap can be mapped again from its file.

    The array must be the mapping itself or, with ``views``, a large contiguous view of it. It must not be
    copy-on-write, because its changes would be missing in the file.
    """
    if array._mmap is None or array.mode not in ("r", "r+", "w+"):  # the first: a copy
        return False
    large = views and array.nbytes >= _MAPPED_NBYTES and (array.flags.c_contiguous or array.flags.f_contiguous)
    whole = isinstance(array.base, mmap.mmap)
    return (whole or large) and array.filename is not None and Path(array.filename).exists()


def _position(array: Any) -> int:
    """Return the byte in its file at which a numpy.memmap, or a view of it, begins."""
    mapping = np.frombuffer(array._mmap, np.uint8)
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # where numpy lets the mapping begin
    return int(begin + array.ctypes.data - mapping.ctypes.data)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], back: list[int]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).permute(back)


def _mapped(name: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], layout: Any) -> Any:
    return np.memmap(name, dtype, mode, offset, shape, layout)


def _write(fd: int, content: Any, room_nbytes: int | None, receivers: int, *, in_main_memory: bool) -> None:
    """Write an object to ``fd``: the number of parts, the lengths of the parts, and the parts.

    The parts are the pickle and its out-of-band buffers. Each part begins at a multiple of 64 bytes. ``room_nbytes``
    and ``receivers``: limit on the memory of the object and of its copies in so many processes. ``in_main_memory``:
    see ``pack``.
    """
    buffers: list[pickle.PickleBuffer] = []
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton, protocol=5, buffer_callback=buffers.append)
    # A dataset may consist of parts of a large file. A batch is copied, so that the sender reads it from the disk.
    pickler.maps_views, pickler.in_main_memory = receivers > 0, in_main_memory
    pickler.dump(content)
    parts = [skeleton.getbuffer(), *(buffer.raw() for buffer in buffers)]
    needed = (
        sum(part.nbytes for part in parts) + receivers * parts[0].nbytes
    )  # receivers share buffers, but copy objects
    if room_nbytes is not None and needed > room_nbytes:
        raise MemoryError(
            f"found {needed / 2**20:.0f} MiB for the object and its copies in other processes; expected at "
            f"most {room_nbytes / 2**20:.0f} MiB"
        )
    lengths = np.array([len(parts), *(part.nbytes for part in parts)], np.int64).tobytes()
    _put(fd, memoryview(lengths), 0)
    at = len(lengths)
    for part in parts:
        at = _aligned(at)
        _put(fd, part, at)
        at += part.nbytes


def _put(fd: int, part: memoryview, at: int) -> None:
    while part.nbytes:
        done = os.pwrite(fd, part[:_WRITE_NBYTES], at)
        part, at = part[done:], at + done


def _read(fd: int) -> Any:
    size = os.fstat(fd).st_size
    # A torch map of the file keeps no descriptor open, unlike Python's mmap; a batch may live long. The map is private,
    # so changes stay in this process.
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
