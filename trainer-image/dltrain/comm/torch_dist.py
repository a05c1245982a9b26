"""torch.distributed's all-reduce: NCCL for buffers on GPUs, gloo for those on CPUs. MPI stays the control plane."""

from functools import partial
from typing import Any

import torch

from dltrain.comm.base import Collective, PeerLostError, Work


class TorchDistributed(Collective):
    name = "Torch"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], host: str = "127.0.0.1") -> None:
        """``host``: an address of rank 0 that every rank reaches; the port is any free one."""
        import torch.distributed as distributed

        super().__init__(comm, buffers)
        self._distributed = distributed
        self._owned = not distributed.is_initialized()
        if self._owned:
            self._join(host)

    def _join(self, host: str) -> None:
        """Make the process group that all of these share."""
        distributed = self._distributed
        backend = "nccl" if self.buffers[0].is_cuda else "gloo"
        store_at = partial(distributed.TCPStore, host, world_size=self.size)
        store = store_at(0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        port = self.comm.bcast(store.port if store is not None else None)
        if store is None:
            store = store_at(port, is_master=False)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)

    def start(self, index: int) -> Work:
        return self.begun(self._distributed.all_reduce, self.buffers[index])

    def begun(self, operation: Any, *arguments: Any) -> "_Pending":
        """One of torch's operations, under way. Raises PeerLostError."""
        try:
            work = operation(*arguments, async_op=True)
        except RuntimeError as error:
            raise PeerLostError(f"a peer is gone: {error}") from error
        return _Pending(work)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            self._distributed.destroy_process_group()


class _Pending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def test(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a peer is gone: {error}") from error
