"""Tests of data parallelism: exactness against one process, gradient buckets, hooks and misuse."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.batch_norm import Ranks, SyncBatchNorm, synchronized
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.gradient_buffer import ALIGNED_NBYTES, GradientBuffer, plan_buckets
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, run_ranks


@pytest.mark.mpi
def test_uneven_shares_rings_and_servers_equal_one_process() -> None:
    ended = run_ranks(3, BODIES / "parallel/exactness.py", "3", timeout_s=120)
    assert ended.output.count("20 steps by") == 15


@pytest.mark.mpi
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
def test_any_shares_equal_one_process(ranks: int) -> None:
    """The loss is a mean over samples or tokens. Hypothesis chooses the shares."""
    ended = run_ranks(ranks, BODIES / "parallel/any_shares.py", str(ranks), timeout_s=120)
    assert re.search(r"\d+ examples, off by at most", ended.output), ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_batch_norm_over_all_ranks_equals_one_process(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "parallel/batch_norm.py", str(ranks), timeout_s=120)
    assert "5 examples, off by at most" in ended.output, ended.output


def wrapped_by_a_trainer(model: nn.Module) -> tuple[Trainer, nn.Module]:
    trainer = Trainer(make_plan(1, steps=1), ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")
    return trainer, trainer.wrap(model, torch.optim.SGD(model.parameters(), 0.1))[0]


def test_layers_of_torch_are_replaced_or_rejected() -> None:
    """Fixed bug: over MPI, layers that torch had converted normalized over the samples of one rank."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1] = nn.SyncBatchNorm.convert_sync_batchnorm(model[1])
    _, found = wrapped_by_a_trainer(model)
    assert isinstance(found[1], SyncBatchNorm) and type(found[2]) is nn.BatchNorm1d
    trainer, found = wrapped_by_a_trainer(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    nn.SyncBatchNorm.convert_sync_batchnorm(found)
    with pytest.raises(MisuseError, match=r"t\.steps: model: found layers of torch.nn.SyncBatchNorm \(1, …\), made"):
        next(trainer.steps(trainer.loader((torch.rand(9, 3),))))
    trainer = Trainer(make_plan(1, steps=1), ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")
    with pytest.raises(MisuseError, match=r"t\.wrap: found no call yet"):
        next(trainer.steps(trainer.loader((torch.rand(9, 3),))))
    model[1] = nn.SyncBatchNorm(2, process_group=object())
    with pytest.raises(MisuseError, match=r"t\.wrap: model: found a torch.nn.SyncBatchNorm with a process group \(1\)"):
        wrapped_by_a_trainer(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_under_autocast_is_exact_up_to_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 16, 16, generator=generator) * 3 + 20
    exact = nn.BatchNorm2d(3)
    layer = synchronized(nn.BatchNorm2d(3), Ranks(list, lambda: True, lambda: 1.0))
    narrow, wide = x.to(dtype).requires_grad_(), x.to(dtype).float().requires_grad_()
    gradient = torch.randn(x.shape, generator=generator) * 10 + 100  # its sum over the batch is beyond float16
    found, expected = layer(narrow), exact(wide)
    found.backward(gradient.to(dtype))
    expected.backward(gradient.to(dtype).float())
    assert narrow.grad is not None and wide.grad is not None
    assert found.dtype == narrow.grad.dtype == dtype
    near = torch.finfo(dtype).eps
    found, expected = found.detach(), expected.detach()
    for a, b in ((found, expected), (layer.weight.grad, exact.weight.grad), (layer.bias.grad, exact.bias.grad)):
        assert float((a.float() - b).norm() / b.norm()) < near
    assert float((narrow.grad.float() - wide.grad).norm() / wide.grad.norm()) < near


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_sharded_optimizer_equals_replicated_ones(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(ranks, BODIES / "parallel/optimizer_parallel.py", str(ranks), tmp_path, timeout_s=200)
    assert ended.output.count(": 20 steps off by") == 8, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_clipping_accumulation_and_unused_or_frozen_layers_equal_one_process(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "parallel/own_loop.py", str(ranks), timeout_s=120)
    assert ended.output.count("off by") == 8, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_steps_in_micro_batches_equal_whole_batches_in_one_process(ranks: int) -> None:
    """Micro-batches of unequal sizes, losses over tokens, clipping, schedules and both data-parallel strategies."""
    ended = run_ranks(ranks, BODIES / "parallel/accumulation.py", str(ranks), timeout_s=200)
    assert ended.output.count("the same as in one process") == 7, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_steps_in_16_bits_equal_autocast_in_one_process(ranks: int) -> None:
    """With unequal local batches and micro-batches; float16 with a loss scale; float32 stays exact.

    With strategy Sharded, layers compute with gathered 16-bit parameters.
    """
    ended = run_ranks(ranks, BODIES / "parallel/precision/mixed_precision.py", str(ranks), timeout_s=200)
    assert ended.output.count("the same as in one process") == 3, ended.output
    assert "misuse is found" in ended.output, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_steps_with_activation_checkpointing_equal_those_without_bit_for_bit(ranks: int) -> None:
    """With unequal local batches, micro-batches, dropout, autocast, BatchNorm, and a sharded optimizer or model."""
    ended = run_ranks(ranks, BODIES / "parallel/activation_checkpointing.py", str(ranks), timeout_s=200)
    assert ended.output.count("the same with and without") == (6 if ranks == 1 else 10), ended.output
    assert "misuse is found" in ended.output, ended.output


@pytest.mark.mpi(2)
def test_ranks_skip_the_same_updates_if_one_overflows_and_resume_their_loss_scale(tmp_path: Path) -> None:
    ended = run_ranks(2, BODIES / "parallel/precision/loss_scale.py", "2", tmp_path)
    assert ended.output.count("all ranks skipped 3 of 14 updates") == 3, ended.output
    assert ended.output.count("resumed bit for bit at a loss scale of") == 3, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_unused_parameters_hold_up_no_reduction_and_do_not_change_the_result(ranks: int) -> None:
    """Without the knowledge of what a pass reaches, no bucket was reduced during backward passes."""
    ended = run_ranks(ranks, BODIES / "parallel/unused_parameters.py", str(ranks), timeout_s=120)
    assert ended.output.count("off by") == 6, ended.output
    found = re.search(r"branches: off by \S+, (\d+) of (\d+) reductions during backward", ended.output)
    assert found is not None, ended.output
    overlapping, total = int(found[1]), int(found[2])
    assert overlapping > 0.9 * total, ended.output


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_grad_scaler_skips_the_same_updates_as_in_one_process(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "parallel/precision/grad_scaler.py", str(ranks), timeout_s=120)
    assert ended.output.count("updates skipped") == 12, ended.output
    assert "RuntimeWarning" not in ended.output


@pytest.mark.mpi(2)
def test_shared_numbers_are_exact_with_16_bit_parameters() -> None:
    ended = run_ranks(2, BODIES / "parallel/precision/low_precision.py", "2", timeout_s=90)
    assert "3 cases are exact" in ended.output


@pytest.mark.mpi
def test_user_training_loops_equal_one_process_or_are_rejected() -> None:
    ended = run_ranks(3, BODIES / "parallel/user_loops.py", "3", timeout_s=120)
    assert ended.output.count("off by") == 13, ended.output


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), longest=st.integers(1, 60), align=st.integers(1, 16)
)
def test_buckets_contain_every_parameter_once_in_order(sizes: list[int], longest: int, align: int) -> None:
    buckets = plan_buckets(sizes, longest, align)
    assert [p for bucket in buckets for p in bucket.parameters] == list(range(len(sizes)))
    gaps = [b.start - stop for b, stop in zip(buckets, (0, *(b.stop for b in buckets)), strict=False)]
    assert all(0 <= gap < align for gap in gaps) and all(b.start % align == 0 for b in buckets)
    for bucket in buckets:
        assert bucket.stop - bucket.start == sum(sizes[p] for p in bucket.parameters)
        assert bucket.stop - bucket.start <= longest or len(bucket.parameters) == 1


def wrapped(model: nn.Module, bucket_nbytes: int = 64) -> DataParallel:
    return DataParallel(model.parameters(), SingleRank, bucket_nbytes, 2)


def test_gradients_are_views_of_the_buffer_in_reverse_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    buffer = wrapped(model).buffer
    assert [p.shape for p in buffer.parameters] == [p.shape for p in list(model.parameters())[::-1]]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(3)
    count = sum(parameter.numel() for parameter in buffer.parameters)
    assert float(buffer.gradient.sum()) == 3 * count and bool((buffer.tail == 0).all()), "alignment gaps are zero"
    assert all(part.data_ptr() % ALIGNED_NBYTES == buffer.flat.data_ptr() % ALIGNED_NBYTES for part in buffer.slices)


def test_gradients_and_loaded_optimizer_state_keep_channels_last() -> None:
    """Otherwise, fused optimizers raise an error on a GPU, and others are slow."""
    torch.manual_seed(0)
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    parallel = wrapped(models[0])
    x = torch.rand(2, 3, 5, 5)
    for model, optimizer in zip(models, optimizers, strict=True):
        parallel.begin(1.0, [0.0, 0.0])
        model(x).square().sum().backward()
        if model is models[0]:
            assert model.weight.grad is not None and model.weight.grad.stride() == model.weight.stride()
            parallel.finish()
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    state = optimizers[0].state_dict()
    for index, values in state["state"].items():
        for key, value in values.items():
            values[key] = parallel.optimizer_part(optimizers[0], index, key, value.contiguous())
    parallel.load_optimizer(optimizers[0], state)
    assert optimizers[0].state[models[0].weight]["exp_avg"].stride() == models[0].weight.stride()


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_keeps_gradients_in_the_buffer(to_none: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.rand(7, 5)
    parallel = wrapped(model)
    parallel.begin(0.5, [0, 0])
    model.zero_grad(set_to_none=to_none)
    model(x).mean().backward()
    parallel.finish()
    twin = nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    twin(x).mean().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad / 2)
        assert parameter.grad.untyped_storage().data_ptr() == parallel.buffer.flat.untyped_storage().data_ptr()


def test_parameter_unused_by_the_loss_is_not_updated() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    parallel = wrapped(nn.ModuleList([used, unused]))
    for _ in range(2):
        parallel.begin(1.0, [0, 0])
        used(torch.ones(1, 2)).sum().backward()
        parallel.finish()
    assert unused.weight.grad is None, "weight decay and momentum would change it"
    assert used.weight.grad is not None and used.weight.grad.any()


def test_second_backward_pass_in_a_step_is_rejected() -> None:
    model = nn.Linear(2, 2)
    parallel = wrapped(model)
    parallel.begin(1.0, [0, 0])
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(MisuseError, match="second backward pass"):
        model(torch.ones(1, 2)).sum().backward()


def test_weight_must_be_set_before_backward() -> None:
    model = nn.Linear(2, 2)
    parallel = wrapped(model)
    parallel.begin(1.0, [0, 0])
    parallel.weigh(0)
    loss = model(torch.ones(1, 2)).sum() * float("nan")
    loss.backward()
    with pytest.raises(MisuseError, match="expected it before backward"):
        parallel.weigh(1)
    parallel.finish()
    assert bool((parallel.buffer.gradient == 0).all()), "a rank without tokens adds zero instead of NaN"


def test_gradients_are_reduced_after_backward() -> None:
    model = nn.Linear(2, 2)
    parallel = wrapped(model)
    parallel.begin(0.5, [0, 0])
    model(torch.ones(1, 2)).sum().backward()
    assert bool((model.weight.grad == 0.5).all()), "weighted before the optimizer step"
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    parallel.finish()
    assert model.weight.grad is not None and float(parallel.buffer.gradient.norm()) == pytest.approx(0.1, rel=1e-4)


def test_gradients_changed_before_all_reduce_are_rejected() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleList([used, unused])
    parallel = wrapped(model)
    for clip in (lambda: parallel.clip(0.1), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)):
        parallel.begin(1.0, [0, 0])
        used(torch.ones(1, 2)).sum().backward()
        assert clip() == pytest.approx(6**0.5)
        parallel.finish()
        assert parallel.gradient_norm() == pytest.approx(0.1 if parallel._norm is None else 6**0.5, rel=1e-4)
        assert float(parallel.buffer.gradient.norm()) == pytest.approx(0.1, rel=1e-4)
        assert unused.weight.grad is None
    parallel.begin(1.0, [0, 0])
    with parallel.accumulating():
        used(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(MisuseError, match=r"2 parameters had no part in the loss\. Clip with t\.clip_gradients"):
        parallel.finish()


def test_gradients_of_a_later_pass_are_added_to_those_reduced_before() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleList([first, second])
    parallel = wrapped(model)
    for _ in range(3):
        parallel.begin(0.5, [0, 0])
        first(torch.ones(1, 2)).sum().backward()
        second(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        parallel.finish()
        assert float(parallel.buffer.gradient.norm()) == pytest.approx(0.1, rel=1e-4)
        assert second.weight.grad is not None and float(second.weight.grad.norm()) > 0.01
    parallel.begin(0.5, [0, 0])
    first(torch.ones(1, 2)).sum().backward()
    second(torch.ones(1, 2)).sum().backward()
    with pytest.raises(MisuseError, match="second backward pass"):
        second(torch.ones(1, 2)).sum().backward()


class OtherRank(SingleRank):
    """Ranks agree on late gradients: another rank has one of the first parameter of the buffer."""

    exchanges = 0

    def start(self, index: int) -> Any:
        type(self).exchanges += 1
        self.buffers[0][0] += 1
        return super().start(index)


def test_clipping_before_a_later_pass_of_another_rank_is_rejected() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleList([used, unused])
    parallel = DataParallel(model.parameters(), SingleRank, 64, 2, agreement=OtherRank)
    parallel.begin(1.0, [0, 0])
    used(torch.ones(1, 2)).sum().backward()
    parallel.finish()
    assert unused.bias.grad is not None, "another rank has a gradient"
    parallel.begin(1.0, [0, 0])
    used(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(MisuseError, match=r"another backward pass on some ranks.*Clip with t\.clip_gradients"):
        parallel.finish()


def test_ranks_exchange_nothing_if_all_parameters_are_reached() -> None:
    model, before = nn.Linear(2, 2), OtherRank.exchanges
    parallel = DataParallel(model.parameters(), SingleRank, 64, 2, agreement=OtherRank)
    for _ in range(2):
        parallel.begin(1.0, [0, 0])
        model(torch.ones(1, 2)).sum().backward()
        parallel.finish()
    assert OtherRank.exchanges == before


def test_parameters_made_trainable_after_wrap_are_rejected() -> None:
    frozen = nn.Linear(2, 3).requires_grad_(False)
    parallel = wrapped(nn.Sequential(frozen, nn.Linear(3, 2)))
    parallel.begin(1.0, [0, 0])
    frozen.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"found trainable parameters \[\(3, 2\)\] that were frozen in t.wrap"):
        parallel.begin(1.0, [0, 0])


def test_mixed_dtypes_are_rejected() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    found = r"2 of torch.float32 on cpu \(the first has shape \(2, 2\)\), 2 of torch.float64 on cpu"
    with pytest.raises(ValueError, match=rf"several kinds: {found}.*model.float\(\).*strategy: Data"):
        GradientBuffer(model.parameters(), 64, 0)


def test_frozen_parameters_may_have_another_dtype() -> None:
    """A frozen model in bfloat16 is often trained by small layers in float32 (LoRA)."""
    model = nn.ModuleList([nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2)])
    assert GradientBuffer(model.parameters(), 64, 0).flat.dtype == torch.float32
    with pytest.raises(ValueError, match="found no trainable parameter"):
        GradientBuffer(model[0].parameters(), 64, 0)
