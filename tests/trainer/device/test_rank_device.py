"""Tests of a rank's device that need no GPU: names, errors, memory and fork safety. benchmarks/gpu tests the rest."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dltrain.builtin.probe import compute_points
from dltrain.checkpoint import memory_copy, state
from dltrain.checkpoint.store import Snapshot
from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.algorithms.torch_distributed import backend_for, raise_lost
from dltrain.device.rank_device import MEMORY_FRACTION, product_label, same_product, samples_within
from dltrain.parallel.data_parallel import DataParallel
from dltrain.protocol.errors import DeviceMissingError, PeerLostError, failure
from support.trainer.ranks import BODIES, run_ranks


@pytest.mark.parametrize(
    ("name", "label", "same"),
    [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB", True),
        ("Tesla T4", "Tesla-T4", True),
        ("Tesla T4", "Tesla-T4-SHARED", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA-A100-SXM4-40GB", False),
        ("AMD Instinct MI300X OAM", "AMD_Instinct_MI300X_OAM", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", False),
        ("NVIDIA A10", "NVIDIA-A100-SXM4-40GB", False),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB@250W", True),
        ("Tesla T4", "Tesla-T4-SHARED@60W", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB@250W", False),
    ],
)
def test_node_label_matches_the_gpu_name_of_torch(name: str, label: str, same: bool) -> None:
    assert same_product(product_label(name), label) is same


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 14 GiB"), "OutOfMemory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "OutOfMemory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "OutOfMemory"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "DeviceFailed"),
        (RuntimeError("CUDA error: device-side assert triggered"), "TrainingError"),
        (torch.distributed.DistBackendError("ncclUnhandledCudaError: 'uncorrectable ECC error'"), "DeviceFailed"),
        (KeyError("out of memory"), "TrainingError"),
        (DeviceMissingError("found no GPU on rank 1"), "DeviceMissing"),
    ],
)
def test_exception_determines_the_failure_reason(error: Exception, reason: str) -> None:
    reported = failure(error, 3, "pod-3")
    assert (reported.reason, reported.rank, reported.host, reported.retry, reported.counts) == (
        reason,
        3,
        "pod-3",
        True,
        True,
    )


def test_missing_gpu_is_reported_of_the_rank_that_lacks_it() -> None:
    """All ranks raise the error, and any of them may report first."""
    reported = failure(DeviceMissingError("found no GPU on rank 1", rank=1, pod="pod-1"), 0, "pod-0")
    assert (reported.rank, reported.host) == (1, "pod-1")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.distributed.DistBackendError("NCCL error: remote process exited\nncclRemoteError: A call"), PeerLostError),
        (torch.distributed.DistBackendError("ncclSystemError: Connection refused by 10.0.0.2<4711>"), PeerLostError),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), PeerLostError),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:9"), PeerLostError),
        (torch.distributed.DistBackendError("ncclInvalidUsage: Duplicate GPU detected"), RuntimeError),
        (torch.distributed.DistBackendError("ncclUnhandledCudaError: 'out of memory' in Connect"), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
    ],
)  # fmt: skip
def test_only_lost_connections_raise_peer_lost(error: RuntimeError, raised: type[Exception]) -> None:
    with pytest.raises(raised) as caught:
        raise_lost(error)
    assert isinstance(caught.value, PeerLostError) is (raised is PeerLostError)


def test_ranks_that_share_a_gpu_or_have_none_do_not_use_nccl() -> None:
    assert backend_for(["GPU-1", "GPU-2"]) == "nccl"
    assert backend_for(["GPU-1", "GPU-2", "GPU-1"]) == backend_for(["cpu", "cpu"]) == "gloo"
    with pytest.raises(
        RuntimeError,
        match=r"gradients: found the gradients of ranks \[1\] on a CPU; expected the gradients of all 2 ranks on GPUs",
    ):
        backend_for(["GPU-1", "cpu"])


@pytest.mark.mpi
def test_missing_gpu_on_one_rank_is_an_error_on_all_and_excepthook_is_unchanged() -> None:
    assert run_ranks(2, BODIES / "training/devices.py", "2").output.count("is well") == 2


@given(fixed=st.integers(1, 2**35), each=st.integers(1, 2**26), share=st.integers(1, 4096), batch=st.integers(1, 10**6))
def test_shares_grow_only_within_available_memory(fixed: int, each: int, share: int, batch: int) -> None:
    usable = 2**36
    most = samples_within(usable, fixed, fixed + each * share, share, batch)
    assert most == share or (most <= batch and fixed + most * each <= MEMORY_FRACTION * usable + each)


def test_probe_skips_batch_sizes_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that gives this test no processor time would make the first step look slow.
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000, process_time=lambda: next(ticks) / 1000)
    monkeypatch.setattr("dltrain.builtin.probe.time", clock)
    tried = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: int) -> None:
        tried.append(samples)
        if samples > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        model(torch.zeros(samples, 2)).sum().backward()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    limit = 8
    points, _ = compute_points(model, optimizer, step, 8, 100)
    assert [size for size, _ in points] == [4, 8] and tried.count(16) == 1
    limit = 7
    with pytest.raises(torch.OutOfMemoryError):
        compute_points(model, optimizer, step, 8, 100)


class Reads(TorchDispatchMode):
    """Counts scalars that Python reads. On a GPU, each read waits for all queued work."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_step_reads_no_scalar_from_the_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    parallel = DataParallel(model.parameters(), SingleRank, 16, 3)
    parallel.weight_at = 2
    with Reads() as reads:
        parallel.begin(0.5, [0.0, 1.0, 0.0])
        loss = model(torch.ones(4, 3)).sum()
        parallel.share(0, (loss.detach() * 0.5,))
        loss.backward()
        sums = parallel.finish()
    assert sums == [pytest.approx(0.5 * float(loss.detach())), 1.0, 0.0] and reads.count == 0


def test_checkpoint_in_memory_leaves_room_for_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(1, {"weight": torch.zeros(2**20)}, {})
    free_nbytes = memory_copy.RESERVE_NBYTES + memory_copy.RESERVE_GPU_NBYTES + 2**22
    monkeypatch.setattr(memory_copy.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_nbytes, f_frsize=1))
    assert [memory_copy.room_for(tmp_path, snapshot, gpus) for gpus in (0, 1, 2)] == [True, True, False]


def test_snapshot_waits_for_the_gpu_once_after_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    copy = state.Staging.copy
    monkeypatch.setattr(state, "finish", lambda device: done.append(f"waited for {device}"))
    monkeypatch.setattr(state.Staging, "copy", lambda self, name, part: done.append(name) or copy(self, name, part))
    one = torch.ones(1)
    state.capture(1, {"a": one}, {"state": {0: {"m": one}}, "param_groups": []}, {}, kept={"b": one})
    assert sorted(done[:-1]) == ["kept b", "model a", "optimizer 0.m"] and done[-1] == "waited for cpu"
