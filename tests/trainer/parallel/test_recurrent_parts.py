"""Tests of recurrent layers in a model that ranks split. They refer weakly to their parameters, which torch cannot swap."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dltrain.models.deferred import deferred, initial_values  # noqa: E402
from dltrain.parallel.model_split.deferred_values import give_values, without_weak_references  # noqa: E402


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_parameters_of_recurrent_layers_can_be_replaced(kind: type[nn.RNNBase]) -> None:
    """Regression: t.wrap failed with "Cannot swap t1 because it has weakref associated with it"."""
    torch.manual_seed(1)
    whole = kind(3, 4, num_layers=2, batch_first=True)
    torch.manual_seed(1)
    model = deferred(lambda: kind(3, 4, num_layers=2, batch_first=True))
    assert initial_values(model) is not None
    values = dict(whole.named_parameters())
    with torch.no_grad(), without_weak_references(model):
        for name, parameter in list(model.named_parameters()):
            give_values(parameter, values[name].detach().clone())
    x = torch.randn(2, 5, 3)
    assert torch.equal(model(x)[0], whole(x)[0])
    model(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
