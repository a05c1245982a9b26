"""The performance model's layer tables and dataset sizes against what the trainer really builds and holds."""

from typing import Any

import pytest

from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin, misfit

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


@pytest.mark.parametrize(("name", "dataset"), CASES)
def test_layer_tables_are_the_models(name: str, dataset: str) -> None:
    """Parameters exactly; operations and what autograd keeps within 3 %, as PyTorch counts them."""
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.flop_counter import FlopCounterMode

    from dltrain.models import InputShape, build

    data, batch = DATASETS[dataset], 2
    tokens = DATASETS[dataset].tokens
    model = build(name, InputShape(data.shape, data.classes, tokens))
    x = torch.randint(0, data.classes, (batch, *data.shape)) if tokens else torch.randn(batch, *data.shape)
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Any) -> Any:
        if tensor.data_ptr() not in own:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, so that its address is not used again
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x).sum().backward()

    workload = builtin(name, dataset)
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    assert workload.tensors == len(list(model.parameters()))
    # PyTorch's counter knows no attention on CPUs.
    counted = [layer for layer in workload.layers if layer.kind in ("conv", "linear")]
    flops = batch * sum(layer.forward_FLOPs + layer.backward_FLOPs for layer in counted)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert batch * workload.activation_nbytes == pytest.approx(sum(n for n, _ in kept.values()), rel=0.03)


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_are_as_the_trainer_loads_them(name: str) -> None:
    from dlcontract import DatasetRef
    from dltrain.data.datasets import load

    data, known = load(DatasetRef(name=name)), DATASETS[name]
    assert (data.train_samples, data.test_samples) == (known.train_samples, known.test_samples)
    assert (data.shape.shape, data.shape.classes) == (known.shape, known.classes)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("model", MODELS)
def test_the_planner_and_the_trainer_refuse_the_same(model: str, dataset: str) -> None:
    from dltrain.models import InputShape, build
    from dltrain.protocol.errors import BadInputError

    data = DATASETS[dataset]
    try:
        build(model, InputShape(data.shape, data.classes, data.tokens))
    except BadInputError:
        assert misfit(model, dataset) is not None
    else:
        assert misfit(model, dataset) is None
