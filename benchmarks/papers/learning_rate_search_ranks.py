"""The ranks of ``learning_rate_search.py`` train every arm one after another. Rank 0 prints a line of JSON for each."""

import json
import sys
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from benchmarks.lib.local_ranks import local_plan

from dlcontract import DatasetRef, ModelRef, OptimizerRef, Plan
from dltrain.batch.shares import apportion
from dltrain.builtin.evaluation import mean_loss
from dltrain.builtin.range_test import ramp
from dltrain.builtin.rank import evaluate, loss_and_accuracy
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.datasets import load
from dltrain.data.feeding.loader import Loader
from dltrain.models import build
from dltrain.optim.learning_rate import rate
from dltrain.optim.optimizers import make_optimizer
from dltrain.protocol.errors import DivergedError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer

GIVEN = "given"
"""Arm without a search: the learning rate that suits the smallest batch."""
WAYS = (GIVEN, "Loss", "Accuracy")
WEIGHTS = {"even": (1, 1), "uneven": (1, 3)}


def main() -> None:
    """Train all arms. The argument is JSON: ``dataset``, ``batch``, ``factors``, ``epochs``, ``rate``, ``seeds``."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    process_group = ProcessGroup.start()
    for seed in settings["seeds"]:
        for factor, way, shares in product(settings["factors"], WAYS, WEIGHTS):
            batch = factor * settings["batch"]
            plan = local_plan(
                apportion(batch, list(WEIGHTS[shares])),
                model=ModelRef(name="mlp"), dataset=DatasetRef(name=settings["dataset"]), epochs=settings["epochs"],
                optimizer=OptimizerRef(learning_rate=settings["rate"]), seed=seed, collective="Ring",
            )  # fmt: skip
            found = trained(plan, process_group, way)
            if process_group.rank == 0:
                arm = {"seed": seed, "factor": factor, "way": way, "shares": shares}
                print(json.dumps(arm | found), flush=True)
    process_group.close()


def trained(plan: Plan, process_group: ProcessGroup, way: str) -> dict[str, Any]:
    """Train the plan's model as the built-in trainer does. Return its accuracy, and its peak learning rate.

    ``way``: GIVEN, or the curve of the range test. ``found`` is False if the test found no rate. ``diverged`` is True
    if the loss was no longer finite, on all ranks; the accuracy is then that of the parameters before this step.
    """
    trainer = Trainer(plan, process_group, RankReporter.open(), torch.device("cpu"), "cpu")
    data = load(plan.dataset, plan.seed)
    torch.manual_seed(plan.seed)
    network = build(plan.model.name or "mlp", data.shape)
    (x, _), optimizer = data.train(np.arange(1)), make_optimizer(plan.optimizer, network)
    model, optimizer = trainer.wrap(network, optimizer, sample=x)
    loader, peak, found = trainer.loader(data), plan.optimizer.learning_rate, True
    assert isinstance(loader, Loader), "the data has random access"
    if way != GIVEN:
        interval = ramp(trainer, loader, partial(loss_and_accuracy, trainer)).interval(way)
        peak, found = (interval.rate, True) if interval else (peak, False)
    diverged = False
    try:
        for x, y in trainer.steps(loader):
            for group in optimizer.param_groups:
                group["lr"] = rate(peak, trainer.step, trainer.total_steps)
            loss = mean_loss(model(x), y)
            trainer.log(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    except DivergedError:
        diverged = True
    accuracy = evaluate(trainer, model, data)
    trainer.close()
    return {"accuracy": accuracy, "rate": peak, "found": found, "diverged": diverged, "steps": trainer.step}


if __name__ == "__main__":
    main()
