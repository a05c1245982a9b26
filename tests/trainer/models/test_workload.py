"""Tests of the performance model's layer tables and dataset sizes against those of the trainer."""

from typing import Any

import pytest

from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin, in_precision, misfit, recomputing

torch = pytest.importorskip("torch")

CASES = [
    ("mlp", "digits"),
    ("mlp", "iris"),
    ("digits-cnn", "digits"),
    ("lenet", "synthetic-images"),
    ("resnet18", "synthetic-images"),
    ("resnet50", "synthetic-images"),
    ("gpt-mini", "synthetic-tokens"),
]
BLOCK_CASES = CASES[-3:]


def fused_attention() -> Any:
    """Return an operation that keeps what fused attention keeps. Without a GPU, torch does not choose it."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out = torch.empty_like(q)
            ctx.save_for_backward(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, Any]:
            return gradient, gradient, gradient

    return Fused


@pytest.mark.parametrize(("name", "dataset"), CASES)
def test_layer_tables_match_the_models(name: str, dataset: str) -> None:
    """Parameters match exactly; operations and activation memory within 3 % of PyTorch's counts."""
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.flop_counter import FlopCounterMode

    from dltrain.models import InputShape, build

    data, batch = DATASETS[dataset], 2
    tokens = DATASETS[dataset].tokens
    model = build(name, InputShape(data.shape, data.classes, tokens))
    x = torch.randint(0, data.classes, (batch, *data.shape)) if tokens else torch.randn(batch, *data.shape)
    parameters = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, tuple[int, Any]] = {}

    def record(tensor: Any) -> Any:
        if tensor.data_ptr() not in parameters:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # keep the tensor, so that its address is not reused
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(record, lambda tensor: tensor):
        model(x).sum().backward()

    workload = builtin(name, dataset)
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    assert workload.tensors == len(list(model.parameters()))
    # PyTorch's counter does not support attention on CPUs.
    counted = [layer for layer in workload.layers if layer.kind in ("conv", "linear")]
    flops = batch * sum(layer.forward_FLOPs + layer.backward_FLOPs for layer in counted)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert batch * workload.activation_nbytes == pytest.approx(sum(n for n, _ in saved.values()), rel=0.03)


@pytest.mark.parametrize(("name", "dataset"), CASES)
def test_layer_tables_match_autocast_on_gpus(name: str, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors follow CUDA's rules of autocast without a GPU: activations within 3 %, copies of all parameters."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks

    from dltrain.models import InputShape, build, gpt

    data = DATASETS[dataset]

    monkeypatch.setattr(
        gpt, "scaled_dot_product_attention", lambda q, k, v, is_causal: fused_attention().apply(q, k, v)
    )

    def kept_nbytes(samples: int) -> float:
        shape = (samples, *data.shape)
        with FakeTensorMode(), torch.device("cuda"):
            model = build(name, InputShape(data.shape, data.classes, data.tokens))
            x = torch.randint(0, data.classes, shape) if data.tokens else torch.randn(shape)
            parameters = {p.untyped_storage()._cdata for p in model.parameters()}
            saved: dict[int, Any] = {}

            def record(tensor: Any) -> Any:
                if (key := tensor.untyped_storage()._cdata) not in parameters:
                    saved[key] = tensor
                return tensor

            torch.set_autocast_enabled("cuda", True)  # torch.autocast demands a GPU
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            torch.autocast_increment_nesting()
            try:
                with saved_tensors_hooks(record, lambda tensor: tensor):
                    model(x)
            finally:
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
                torch.set_autocast_enabled("cuda", False)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    few, more = kept_nbytes(2), kept_nbytes(4)
    workload = in_precision(builtin(name, dataset), "BF16")
    assert (more - few) / 2 == pytest.approx(workload.activation_nbytes, rel=0.03)
    # The copies of biases are not needed by the backward pass.
    assert 0.6 * workload.parameter_copies_nbytes <= 2 * few - more <= workload.parameter_copies_nbytes


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize(("name", "dataset"), BLOCK_CASES)
def test_layer_tables_match_activation_checkpointing(name: str, dataset: str, precision: Any, monkeypatch: Any) -> None:
    """Kept bytes within 3 % of torch's: block inputs, all outside of blocks, and the largest block's own tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks

    from dltrain.models import InputShape, blocks_of, build, gpt
    from dltrain.models.recomputation import has_run, recompute

    data, half = DATASETS[dataset], precision != "FP32"
    monkeypatch.setattr(
        gpt, "scaled_dot_product_attention", lambda q, k, v, is_causal: fused_attention().apply(q, k, v)
    )

    def kept_nbytes(samples: int) -> list[int]:
        """Return the bytes of a batch that are kept outside of blocks and in each block, on fake CUDA tensors."""
        with FakeTensorMode(), torch.device("cuda"):
            model = build(name, InputShape(data.shape, data.classes, data.tokens))
            x = (
                torch.randint(0, data.classes, (samples, *data.shape))
                if data.tokens
                else torch.randn(samples, *data.shape)
            )
            weights = {p.untyped_storage()._cdata for p in model.parameters()}
            blocks, kept, inputs = blocks_of(model), dict[int, Any](), dict[int, Any]()
            within: list[dict[int, Any]] = []

            def note(into: dict[int, Any]) -> Any:
                def save(tensor: Any) -> Any:
                    if (key := tensor.untyped_storage()._cdata) not in weights:
                        into[key] = tensor
                    return tensor

                return saved_tensors_hooks(save, lambda tensor: tensor)

            def autocast(forward: Any, given: Any) -> Any:
                torch.set_autocast_enabled("cuda", half)  # torch.autocast demands a GPU
                torch.set_autocast_dtype("cuda", torch.bfloat16)
                torch.autocast_increment_nesting()
                try:
                    return forward(given)
                finally:
                    torch.autocast_decrement_nesting()
                    torch.clear_autocast_cache()
                    torch.set_autocast_enabled("cuda", False)

            for block in blocks:  # what a block keeps by itself is what its second forward pass keeps
                block.register_forward_pre_hook(lambda block, args: inputs.update({id(block): args[0]}))
            autocast(model, x)
            for block in blocks:
                own: dict[int, Any] = {}
                with note(own):
                    autocast(block, inputs[id(block)])
                own.pop(inputs[id(block)].untyped_storage()._cdata, None)
                within.append(own)
                recompute(block)
            with note(kept):
                autocast(model, x)
            assert all(map(has_run, blocks))

            def nbytes(saved: dict[int, Any]) -> int:
                return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

            return [nbytes(kept), *map(nbytes, within)]

    few, more = kept_nbytes(2), kept_nbytes(4)
    outside, *blocks = ((b - a) / 2 for a, b in zip(few, more, strict=True))  # without copies of weights
    workload = recomputing(in_precision(builtin(name, dataset), precision))
    assert outside + max(blocks) == pytest.approx(workload.activation_nbytes, rel=0.03)


@pytest.mark.parametrize(("name", "dataset"), BLOCK_CASES)
def test_recomputed_operations_match_the_models(name: str, dataset: str) -> None:
    """Exactly: torch ends a second forward pass when it has all tensors that the backward pass needs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from dltrain.models import InputShape, blocks_of, build
    from dltrain.models.recomputation import recompute

    data = DATASETS[dataset]
    with FakeTensorMode():
        model = build(name, InputShape(data.shape, data.classes, data.tokens))
        x = torch.randint(0, data.classes, (2, *data.shape)) if data.tokens else torch.randn(2, *data.shape)
        for block in blocks_of(model):
            recompute(block)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
    # PyTorch's counter does not support attention on CPUs.
    counted = [layer for layer in recomputing(builtin(name, dataset)).layers if layer.kind in ("conv", "linear")]
    assert counter.get_total_flops() == 2 * sum(layer.forward_FLOPs + layer.backward_FLOPs for layer in counted)


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_sizes_match_the_trainer(name: str) -> None:
    from dlcontract import DatasetRef
    from dltrain.data.datasets import load

    data, planned = load(DatasetRef(name=name)), DATASETS[name]
    assert (data.train_samples, data.test_samples) == (planned.train_samples, planned.test_samples)
    assert (data.shape.shape, data.shape.classes) == (planned.shape, planned.classes)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("model", MODELS)
def test_planner_and_trainer_reject_the_same_combinations(model: str, dataset: str) -> None:
    from dltrain.models import InputShape, build
    from dltrain.protocol.errors import BadInputError

    data = DATASETS[dataset]
    try:
        build(model, InputShape(data.shape, data.classes, data.tokens))
    except BadInputError:
        assert misfit(model, dataset) is not None
    else:
        assert misfit(model, dataset) is None
