"""A rank of ``cifar10.py``: train Caffe's net with the trainer, and print the accuracy on held-out images."""

import json
import os

import numpy as np
import torch
from benchmarks.papers.cifar10_net import caffe_net, groups, mean_image

from dltrain.builtin.evaluation import count_correct, mean_loss
from dltrain.data.datasets import load
from dltrain.train import session
from dltrain.train.trainer import Trainer

SETTINGS_ENV = "CIFAR10"


def train(trainer: Trainer) -> None:
    """Train for the plan's steps. The settings are the net's name, the learning rate and the last steps at a tenth."""
    settings, plan = json.loads(os.environ[SETTINGS_ENV]), trainer.plan
    data = load(plan.dataset, plan.seed)
    torch.manual_seed(plan.seed)
    mean = mean_image(data.train(np.arange(data.train_samples))[0])
    net = caffe_net(settings["net"], mean if mean.dim() == 3 else mean[None], data.shape.classes)
    rate, full = plan.optimizer.learning_rate, settings["net"] == "full"
    optimizer = torch.optim.SGD(groups(net, rate, full), lr=rate, momentum=plan.optimizer.momentum)
    model, optimizer = trainer.wrap(net, optimizer)
    for x, y in trainer.steps(trainer.loader(data)):
        lowered = 0.1 if trainer.step >= trainer.total_steps - settings["lowered"] else 1.0
        for group in optimizer.param_groups:
            group["lr"] = lowered * rate * group["factor"]
        loss = mean_loss(model(x if x.dim() == 4 else x[:, None]), y)
        trainer.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if trainer.rank == 0:  # with a layered server, too, all ranks hold the same parameters after each step
        net.eval()
        every = np.arange(data.test_samples)
        right, seen = count_correct(lambda x: net(x if x.dim() == 4 else x[:, None]), data, every, trainer.device)
        print(json.dumps({"accuracy": right / seen}), flush=True)


if __name__ == "__main__":
    session.leave(session.run(train))
