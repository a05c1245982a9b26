"""Training with a ``Trainer`` on real ranks and with plain PyTorch in one process, for comparison."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlcontract import ModelRef
from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan

BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Maximum relative distance of a gradient from that of one process."""
Step = Callable[[nn.Module, Any, Trainer | None], torch.Tensor]
"""Maps (model, batch, trainer or None in one process) to the mean loss of the batch."""
MakeOptimizer = Callable[[nn.Module], Optimizer]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def four_classes(samples: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight random features and a class per sample, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 8, generator=generator, dtype=dtype), torch.arange(samples) % 4


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(model: nn.Module) -> torch.Tensor:
    """Return all parameters of a model of strategy Sharded. All ranks must call it."""
    parameters: list[Any] = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters), "every parameter is sharded"
    return torch.cat([p.detach().full_tensor().flatten() for p in parameters])


def strategy_fields(strategy: str, ranks: int) -> dict[str, Any]:
    """Return the fields of a plan with a strategy (Data, Optimizer or Sharded, which only scripts of all ranks use)."""
    if strategy != "Sharded":
        return {"parallelism": strategy, "collective": "Ring"}
    script = ModelRef(command=("python", "train.py"))
    return {"parallelism": strategy, "collective": "Torch", "model": script, "min_ranks": ranks}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative distance of ``a`` from ``b`` by norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def train_in_one_process(
    model: nn.Module, data: tuple[torch.Tensor, ...], step: Step, batch: int, steps: int, optimizer: MakeOptimizer = sgd
) -> torch.Tensor:
    """Train ``model`` in place with plain PyTorch for ``steps``. Return the first gradient."""
    opt = optimizer(model)
    sampler, first = Sampler(len(data[0]), batch, 0), torch.empty(0)
    for number in range(steps):
        chosen = torch.from_numpy(sampler.part(number, [1], 0).indices)
        opt.zero_grad()
        step(model, [part[chosen] for part in data], None).backward()
        first = first if number else gradient_of(model)
        opt.step()
    return first


def train_on_all_ranks(
    group: ProcessGroup,
    model: nn.Module,
    data: tuple[torch.Tensor, ...],
    step: Step,
    steps: int,
    optimizer: MakeOptimizer = sgd,
    wrap: dict[str, Any] | None = None,
    model_: ModelRef | None = None,
    **plan: Any,
) -> tuple[torch.Tensor, Trainer]:
    """Train the same on all ranks with shares and strategy of ``plan``. Return the first gradient and the closed trainer."""
    shares = plan["shares"]
    plan |= {"model": model_} if model_ is not None else {}
    made = make_plan(global_batch=sum(shares), steps=steps, bucket_nbytes=4096, segment_nbytes=1024, **plan)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    model, opt = trainer.wrap(model, optimizer(model), **(wrap or {}))
    first = torch.empty(0)
    for batch in trainer.steps(trainer.loader(data)):
        step(model, batch, trainer).backward()
        opt.step()
        if trainer.step == 1:
            first = gradient_of(model)
    trainer.close()
    return first, trainer


def equal_on_all(group: ProcessGroup, model: nn.Module) -> None:
    bits = flat(model).numpy().tobytes()
    assert group.broadcast(bits) == bits, "parameters differ between ranks"


def with_hypothesis(
    group: ProcessGroup, example: Callable[[Any], None], given: Callable[[Callable[[Any], None]], Any]
) -> int:
    """Call ``example`` on all ranks with values that hypothesis chooses on rank 0. Return the number of values.

    ``given`` is hypothesis's decorator. A failure must occur on rank 0 too, or end the whole process group.
    """
    count = 0
    if group.rank == 0:

        def lead(value: Any) -> None:
            nonlocal count
            count += 1
            group.broadcast(json.dumps(value).encode())
            example(value)

        given(lead)()
        group.broadcast(b"null")
        return count
    while (value := json.loads(group.broadcast(b""))) is not None:
        count += 1
        example(value)
    return count


def start_process_group() -> ProcessGroup:
    """Start the process group, whose size is the first argument of the program."""
    torch.set_num_threads(1)
    group = ProcessGroup.start()
    group.expect(int(sys.argv[1]))
    return group


def print_on_rank_0(group: ProcessGroup, text: str) -> None:
    if group.rank == 0:
        sys.stdout.write(f"{text}\n")
