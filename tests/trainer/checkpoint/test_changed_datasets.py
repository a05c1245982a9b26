"""A resumed training continues at a place in its data, which depends on the number of samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlcontract import DatasetRef
from dltrain.builtin import rank
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan, saving


def trainer_of(folder: Path, epochs: int, **changes: Any) -> Trainer:
    plan = make_plan(1, global_batch=10, epochs=epochs, checkpoint=saving(folder), **changes)
    return Trainer(plan, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")


def script(folder: Path, samples: int, epochs: int) -> None:
    """Train as a script does."""
    t = trainer_of(folder, epochs)
    model = nn.Linear(3, 2)
    model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    for (x,) in t.steps(t.loader((torch.rand(samples, 3),))):
        model(x).square().mean().backward()
        opt.step()
    t.close()


def built_in(folder: Path, samples: int, epochs: int) -> None:
    x, y = np.random.default_rng(1).random((samples, 4), np.float32), np.arange(samples) % 3
    np.savez(folder / "data.npz", x=x, y=y, x_test=x[:6], y_test=y[:6])
    t = trainer_of(folder, epochs, dataset=DatasetRef(path=str(folder / "data.npz")))
    rank.train(t)
    t.close()


@pytest.mark.parametrize("train", [script, built_in])
@pytest.mark.parametrize("samples", [60, 20])
def test_another_number_of_samples_is_an_error_that_names_both(tmp_path: Path, samples: int, train: Any) -> None:
    """Fixed bug: with twice the samples, the training went back by half of its epochs, and with fewer it ended early."""
    train(tmp_path, 40, 2)
    with pytest.raises(BadInputError, match=rf"found {samples} samples; expected 40 samples, as in the checkpoint in "):
        train(tmp_path, samples, 3)
    train(tmp_path, 40, 3)


def test_a_script_may_change_its_data_during_a_run(tmp_path: Path) -> None:
    t = trainer_of(tmp_path, 1)
    model = nn.Linear(3, 2)
    model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))

    def steps(samples: int) -> None:
        for (x,) in t.steps(t.loader((torch.rand(samples, 3),))):
            model(x).square().mean().backward()
            opt.step()

    steps(40)
    with pytest.warns(UserWarning, match="another call after all 4 steps"):
        steps(60)
    assert t.step == 6
    t.close()
