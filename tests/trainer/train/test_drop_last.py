"""A last batch of one sample, which batch normalization rejects."""

import pytest
import torch
from torch import nn

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan


def steps(*, drop_last: bool) -> int:
    """Train two epochs of 9 samples in batches of 4. Return the number of steps."""
    plan = make_plan(1, global_batch=4, epochs=2)
    trainer = Trainer(plan, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model, opt = trainer.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = trainer.loader((torch.rand(9, 3),), drop_last=drop_last)
    for (x,) in trainer.steps(loader):
        model(x).square().mean().backward()
        opt.step()
    assert trainer.step == trainer.total_steps == loader.total_steps
    trainer.close()
    return trainer.step


def test_drop_last_leaves_out_a_batch_that_batch_norm_rejects() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        steps(drop_last=False)
    assert steps(drop_last=True) == 4
