"""torch.distributed's all-reduce: NCCL between GPUs, otherwise gloo. MPI remains the control plane.

gloo is used for buffers on CPUs, and for ranks that share a GPU, because NCCL does not support these.
"""

import re
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from dltrain.comm.core.collective import Collective, PeerLostError, Work
from dltrain.comm.core.fault_tolerance import translate

_TIMEOUT = timedelta(days=1)
"""Timeout of operations after the first one. The agents detect hanging ranks, because they know which phases may take
long. torch's default (10 minutes with NCCL) would end ranks that wait while another rank evaluates."""
_PEER_LOST = re.compile(r"ncclRemoteError|remote process exited|[Cc]onnect|closed by|[Bb]roken pipe|[Ss]ocket")
"""NCCL's messages about a peer that exited or is unreachable."""


class TorchDistributed(Collective):
    name = "Torch"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], host: str = "127.0.0.1") -> None:
        """Join torch's process group, or use the existing one. All ranks must call this together.

        ``host``: an address of rank 0 that all ranks can reach. Rank 0 listens there on any free port.
        """
        import torch.distributed as distributed

        super().__init__(comm, buffers)
        self._distributed = distributed
        self._owned = not distributed.is_initialized()
        if self._owned:
            self._join(host)

    def _join(self, host: str) -> None:
        """Create torch's process group, which all collectives share, and connect it.

        Raise PeerLostError if another rank is lost, and RuntimeError if this rank itself fails, such as without free
        memory.
        """
        from mpi4py import MPI

        distributed, device = self._distributed, self.buffers[0].device
        store_at = partial(distributed.TCPStore, host, world_size=self.size)
        try:
            backend = backend_for(self.comm.allgather(identity(device)))
            store = store_at(0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
            port = self.comm.bcast(store.port if store is not None else None)
        except MPI.Exception as error:
            raise translate(error) from error
        hook = sys.excepthook
        try:
            if store is None:
                store = store_at(port, is_master=False)
            bound = device if backend == "nccl" else None  # With a device, NCCL connects at once.
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, device_id=bound)
            distributed.all_reduce(torch.zeros(1, device=device))
            distributed.distributed_c10d._set_pg_timeout(_TIMEOUT)
        except RuntimeError as error:
            raise_lost(error)
        finally:
            sys.excepthook = hook  # torch's hook calls ours with another stderr, which would lose the final message

    def start(self, index: int) -> Work:
        return self.begun(self._distributed.all_reduce, self.buffers[index])

    def begun(self, operation: Any, *arguments: Any) -> "_Pending":
        """Start ``operation``, a function of torch.distributed, with ``arguments``, and return the pending operation.

        Raise PeerLostError if another rank is lost, and RuntimeError if this rank itself fails.
        """
        try:
            work = operation(*arguments, async_op=True)
        except RuntimeError as error:
            raise_lost(error)
        return _Pending(work)

    def another_group(self) -> Any:
        """Return a further process group of the same ranks, on CPUs, for a thread of its own. All ranks must call it.

        Raise PeerLostError if a rank is lost.
        """
        try:
            group = self._distributed.new_group(backend="gloo")
            self._distributed.barrier(group)
        except RuntimeError as error:
            raise_lost(error)
        self._distributed.distributed_c10d._set_pg_timeout(_TIMEOUT, group)
        return group

    def close(self) -> None:
        if self._owned:
            self._owned = False
            if self._distributed.is_initialized():  # A script may have ended it, as scripts for torchrun do.
                self._distributed.destroy_process_group()


class _Pending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def test(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for the operation. On a GPU, only the current stream waits, and this method returns at once."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise_lost(error)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the operation as a future of the list of its results. Its errors are those of torch.distributed."""
        future: torch.futures.Future[list[torch.Tensor]] = self._work.get_future()
        return future


def identity(device: torch.device) -> str:
    """Return a text that identifies a GPU among the GPUs of all ranks, or "cpu" for every CPU."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    return str(getattr(found, "uuid", f"{socket.gethostname()} {device.index}"))


def backend_for(identities: Sequence[str]) -> str:
    """Return torch's backend: nccl if every rank has its own GPU, gloo if ranks are on CPUs or share a GPU.

    ``identities``: result of ``identity`` for each rank's device. Raises RuntimeError if only some ranks are on a GPU.
    """
    cpus = identities.count("cpu")
    if 0 < cpus < len(identities):
        numbers = [number for number, device in enumerate(identities) if device == "cpu"]
        raise RuntimeError(
            f"gradients: found the gradients of ranks {numbers} on a CPU; expected the gradients of all "
            f"{len(identities)} ranks on GPUs. Check that these ranks can use their GPUs"
        )
    return "nccl" if not cpus and len(set(identities)) == len(identities) else "gloo"


def raise_lost(error: RuntimeError) -> NoReturn:
    """Raise PeerLostError if ``error`` means that another rank was lost. Otherwise raise ``error`` itself."""
    found = interpret(error)
    if found is error:
        raise error
    raise found from error


def interpret(error: RuntimeError) -> RuntimeError:
    """Return a PeerLostError if ``error`` means that another rank was lost. Otherwise return ``error`` itself.

    ``error``: an error of torch.distributed. Out-of-memory errors and device errors are errors of this rank. NCCL has
    one class for all its errors, so the message decides. Every other error comes from gloo and means a lost rank.
    """
    own = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
    if not own and isinstance(error, torch.distributed.DistBackendError):
        own = not _PEER_LOST.search(str(error)) or "out of memory" in str(error)
    if own or isinstance(error, PeerLostError):
        return error
    return PeerLostError(f"lost a peer: {error}")
