"""Train small layers beside a frozen base (LoRA) on every rank, with ``t.wrap(…, save="trained")``.

Arguments: ranks, a folder for checkpoints, a strategy, and then any of: ``kill`` to kill rank 1 after a checkpoint,
``first`` to kill rank 0 instead, ``elastic`` to let the other ranks continue, ``longer`` to train more steps,
``separate`` to give each rank a folder of its own, and a URI for the checkpoints. Rank 0 prints a hash of the model.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from dlcontract import CheckpointRef, ModelRef
from dltrain.checkpoint.tensor_file import content
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import four_classes, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan

STEPS, KILLED_AT, BATCH, SAMPLES, WIDTH = 12, 5, 12, 77, 64
FROZEN = [f"{layer}.base.{name}" for layer in (0, 2, 4) for name in ("weight", "bias")]
STORED = {f"{layer}.{name}.weight" for layer in (0, 2, 4) for name in ("down", "up")} | {"5.seen"}
"""Names of the model's tensors: those without which a checkpoint is stored, and all others."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "Data": {},
    "Optimizer": {"parallelism": "Optimizer", "collective": "Ring"},
    "Sharded": {"parallelism": "Sharded", "collective": "Torch"},
    "Pipeline": {"parallelism": "Pipeline", "micro_batches": 3},
}


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((folder / "digits-0001").glob("step-*"))


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of rank 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Counting(nn.Module):
    """A layer whose result depends on the number of its calls, which is in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x * (1 + 0.01 * self.seen)


def network(*, buffers: bool = True, seed: int = 0) -> nn.Sequential:
    """Return three layers, whose base depends on ``seed``. ``buffers``: False to leave out the layer with a buffer."""
    torch.manual_seed(seed)
    net = nn.Sequential(Adapted(8, WIDTH), nn.Tanh(), Adapted(WIDTH, WIDTH), nn.Tanh(), Adapted(WIDTH, 4))
    return net.append(Counting()) if buffers else net


def optimizer(net: nn.Module) -> Optimizer:
    return AdamW([parameter for parameter in net.parameters() if parameter.requires_grad], 0.01)


def main() -> None:
    group, folder, strategy, flags = start_process_group(), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    uri = next((flag for flag in flags if flag.startswith("s3://")), None)
    killed = 0 if "first" in flags else 1 if "kill" in flags else -1
    splits, elastic = strategy == "Pipeline", "elastic" in flags
    folder = folder / str(group.rank) if "separate" in flags else folder
    plan = make_plan(
        global_batch=BATCH, steps=STEPS * (2 if "longer" in flags else 1), model=ModelRef(command=("train.py",)),
        shares=[BATCH if splits else BATCH // group.size] * group.size,
        checkpoint=CheckpointRef(directory=str(folder), interval_s=1e-6, uri=uri),
        min_ranks=1 if elastic else group.size, bucket_nbytes=4096, segment_nbytes=1024, **STRATEGIES[strategy],
    )  # fmt: skip
    t = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    data = four_classes(SAMPLES)
    model = t.create(lambda: network(buffers=not splits))
    model, opt = t.wrap(model, optimizer(model), sample=data[0][:2], save="trained")
    for x, y in t.steps(t.loader(data)):
        if killed >= 0 and t.step == KILLED_AT and t.alive == t.size:
            t.checkpoint_manager.wait()
            group.sum([0.0])
            if t.rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
        t.run(model, x, y, cross_entropy)
        opt.step()
    whole = t.parallel.weights(model)
    digest = hashlib.sha256(b"".join(bytes(content(value.contiguous())) for value in whole.values()))
    print_on_rank_0(group, f"model {digest.hexdigest()} of {len(whole)} tensors after {t.step} steps")
    if killed >= 0:
        sys.stdout.flush()
        session.leave(0)
    t.close()
    group.close()


if __name__ == "__main__":
    main()
