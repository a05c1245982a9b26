"""A second optimizer beside that of ``t.wrap``, and a second update with the same batch: ranks do not sum their gradients."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, run_ranks


def train(update: Callable[[nn.Module, Tensor], None]) -> None:
    """Train for three steps, with ``update(model, inputs)`` after each update of the model."""
    trainer = Trainer(
        make_plan(1, global_batch=4, epochs=1), ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu"
    )
    model, opt = trainer.wrap(model := nn.Linear(3, 2), SGD(model.parameters(), 0.1))
    for (x,) in trainer.steps(trainer.loader((torch.rand(12, 3),))):
        model(x).square().mean().backward()
        opt.step()
        update(model, x)
    trainer.close()


def updating(optimizer: Optimizer, module: nn.Module) -> Callable[[nn.Module, Tensor], None]:
    def update(model: nn.Module, x: Tensor) -> None:
        optimizer.zero_grad()
        module(model(x)).mean().backward()
        optimizer.step()

    return update


def test_update_of_parameters_that_ranks_do_not_share_is_named_once() -> None:
    """Fixed bug: each rank trained its own values, and a restart began with new ones, without a word."""
    critic = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match=r"a second optimizer \(Adam\) of 2 parameters that t\.wrap does not") as found:
        train(updating(torch.optim.Adam(critic.parameters()), critic))
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updating(torch.optim.Adam(critic.parameters()), critic)(nn.Linear(3, 2), torch.rand(1, 3))  # after the training


def test_inputs_and_parameters_of_the_model_may_have_an_optimizer_of_their_own() -> None:
    def disturb(model: nn.Module, x: Tensor) -> None:
        change = torch.zeros_like(x, requires_grad=True)
        inner = SGD([change], 0.1)
        model(x + change).mean().backward()
        inner.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(disturb)
        train(lambda model, x: SGD(model.parameters(), 0.01).step())


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_second_update_with_the_same_batch_is_refused_on_several_ranks(ranks: int) -> None:
    """Fixed bug: the parameters of ranks differed from the first step on, and the error at the end blamed a device."""
    ended = run_ranks(ranks, BODIES / "training/scripts/second_update.py", str(ranks))
    expected = "3 steps" if ranks == 1 else "after 1 steps: opt.step(): found a second call for the same batch"
    assert ended.code == 0 and ended.output.count(expected) == ranks, ended.output
