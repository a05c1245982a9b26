"""Arguments of the wrong type end with one error that names the call, which is not retried as an error of the script."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import SGD

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import MisuseError, failure
from dltrain.protocol.reporter import RankReporter
from dltrain.train.session import local_plan
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.gather([1.0, 2.0]), "t.gather: found list; expected a tensor with a row for each sample"),
        (lambda t: t.gather(torch.tensor(1.0)), "t.gather: found one number; expected a row per sample"),
        (lambda t: t.mean(0.5), "t.mean: found float; expected a tensor"),
        (lambda t: t.mean((torch.ones(2), torch.ones(2))), "t.mean: found tuple; expected a tensor"),
        (lambda t: t.weigh("many"), "t.weigh: found 'many' tokens; expected the number of tokens"),
        (lambda t: t.weigh(None), "t.weigh: found NoneType tokens; expected the number of tokens"),
        (lambda t: t.weigh(torch.ones(2)), "t.weigh: found Tensor tokens; expected the number of tokens"),
        (lambda t: t.weigh(-1), "t.weigh: found -1 tokens; expected the number of tokens"),
        (lambda t: t.clip_gradients("1"), "t.clip_gradients: max_norm: found '1'; expected a finite number"),
        (lambda t: t.clip_gradients(None), "t.clip_gradients: max_norm: found NoneType; expected a finite number"),
        (lambda t: t.clip_gradients(torch.ones(2)), "t.clip_gradients: max_norm: found Tensor; expected a finite"),
        (lambda t: t.log(loss=torch.tensor(1j)), "t.log: loss: found a complex number; expected a real one"),
        (lambda t: t.loader("train.csv"), "dataset: found str; expected a map-style dataset"),
        (lambda t: t.loader(b"samples"), "dataset: found bytes; expected a map-style dataset"),
    ],
)
def test_wrong_arguments_are_misuse(call: Callable[[Any], object], message: str) -> None:
    """Fixed bug: most of these ended with an AttributeError or a TypeError inside of dltrain."""
    plan = make_plan(1, global_batch=4, epochs=1)
    trainer = Trainer(plan, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")
    model, opt = trainer.wrap(model := nn.Linear(3, 2), SGD(model.parameters(), 0.1))
    for (x,) in trainer.steps(trainer.loader((torch.rand(12, 3),))):
        with pytest.raises(MisuseError) as found:
            call(trainer)
        assert str(found.value).startswith(message), found.value
        model(x).square().mean().backward()
        opt.step()
    trainer.close()


def test_error_names_the_line_of_the_script_and_not_of_torch() -> None:
    """Fixed bug: the message named optimizer.py, because torch's ``Optimizer.step`` calls dltrain."""
    trainer = Trainer(make_plan(1, global_batch=4), ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")
    model, opt = trainer.wrap(model := nn.Linear(3, 2), torch.optim.LBFGS(model.parameters()))
    for _ in trainer.steps(trainer.loader((torch.rand(12, 3),))):
        with pytest.raises(MisuseError) as found:
            opt.step(lambda: 0.0)  # type: ignore[arg-type]
        break
    message = failure(found.value, 0, "host").message
    assert re.match(r"test_misused_calls\.py, line \d+: LBFGS\.step: found a closure; expected none", message), message
    trainer.close()


def test_steps_take_the_place_of_epochs() -> None:
    common: Any = {"batch": 4, "epochs": 10, "seed": 0, "collective": "Ring", "checkpoints": None}
    plan = local_plan(1, steps=7, **common)
    assert (plan.steps, plan.epochs) == (7, None)
    with pytest.raises(ValidationError, match="steps"):
        local_plan(1, steps=0, **common)


def test_checkpoints_may_be_a_path(tmp_path: Any) -> None:
    """Fixed bug: ``dltrain.init(checkpoints=Path(…))`` ended with an AttributeError."""
    common: Any = {"batch": 4, "epochs": 1, "seed": 0, "collective": "Ring"}
    assert local_plan(1, checkpoints=tmp_path, **common) == local_plan(1, checkpoints=str(tmp_path), **common)
