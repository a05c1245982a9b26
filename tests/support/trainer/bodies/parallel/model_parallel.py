"""Check on every rank that a model-parallel run learns the same as one process up to rounding.

Their checkpoints agree too, and each can resume from the other's.

Arguments: ranks, a folder for checkpoints and, with several replicas of the model, their number, and "resumes" to
check only checkpoints.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dlcontract import CheckpointRef, replica_batches
from dltrain.builtin.evaluation import mean_loss
from dltrain.checkpoint.store import MODEL, OPTIMIZER
from dltrain.comm.process_group import ProcessGroup
from dltrain.models import InputShape, build
from dltrain.models.deferred import deferred
from dltrain.parallel.model_split.pipeline import Pipeline
from dltrain.protocol.errors import BadInputError, ParametersDivergedError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    BOUND,
    MakeOptimizer,
    distance,
    flat,
    print_on_rank_0,
    start_process_group,
    train_in_one_process,
)
from support.trainer.plans import make_plan

REPLICAS = int(sys.argv[3]) if len(sys.argv) > 3 else 1
STEPS, BATCH, SAMPLES = 6, 12, 30
if REPLICAS > 1:
    BATCH, SAMPLES = 13, 27  # replicas get unequal parts, and the last batch of an epoch has a single sample
DIGITS, TOKENS = InputShape((1, 8, 8), 10), InputShape((8,), 16, tokens=True)
MODELS = {
    "mlp": DIGITS,
    "digits-cnn": DIGITS,
    "lenet": InputShape((1, 28, 28), 10),
    "resnet18": DIGITS,
    "gpt-mini": TOKENS,
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3),
}


def quiet() -> RankReporter:
    """Return a reporter that prints no progress."""
    reporter = RankReporter(None)
    reporter.rank = 1
    return reporter


def model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return build(name, MODELS[name]).to(dtype)


def deferred_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Return the same model for ranks that split it. Only rank 0 draws the right values, which the others receive."""
    torch.manual_seed(int(os.environ["OMPI_COMM_WORLD_RANK"]))
    return deferred(lambda: build(name, MODELS[name])).to(dtype)


def data(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape, generator = MODELS[name], torch.Generator().manual_seed(7)
    if shape.tokens:
        x = torch.randint(shape.classes, (SAMPLES, *shape.shape), generator=generator)
        return x, (x + 1) % shape.classes
    return torch.rand(SAMPLES, *shape.shape, generator=generator, dtype=dtype), torch.arange(SAMPLES) % shape.classes


def batch_loss(net: nn.Module, batch: Any, trainer: Trainer | None) -> Tensor:
    return mean_loss(net(batch[0]), batch[1])


def split(
    group: ProcessGroup,
    name: str,
    dtype: torch.dtype,
    steps: int,
    optimizer: MakeOptimizer,
    folder: Path | None,
    stepped: Callable[[nn.Module, int], object] = lambda net, step: None,
    **plan: Any,
) -> tuple[dict[str, Tensor], Tensor, Trainer]:
    """Train on all ranks. Return, on rank 0, the parameters after ``steps`` by name and the first gradient.

    ``stepped`` is called with the model and the number of the step after each step.
    """
    net, samples = deferred_model(name, dtype), data(name, dtype)
    parts = group.size // REPLICAS
    shares = [share for share in replica_batches(BATCH, REPLICAS) for _ in range(parts)]
    made = make_plan(
        group.size, shares=shares, global_batch=BATCH, min_ranks=group.size, steps=steps, replicas=REPLICAS,
        compare_steps=1, bucket_nbytes=4096, segment_nbytes=1024,
        checkpoint=CheckpointRef(enabled=folder is not None, directory=str(folder), interval_s=1e6), **plan,
    )  # fmt: skip
    trainer = Trainer(made, group, quiet(), torch.device("cpu"), "cpu")
    net, opt = trainer.wrap(net, optimizer(net), sample=samples[0][:1])
    first = torch.empty(0)
    for x, y in trainer.steps(trainer.loader(samples)):
        if isinstance(trainer.parallel, Pipeline):
            trainer.parallel.run(x, y, mean_loss)
        else:
            mean_loss(net(x), y).backward()
        opt.step()
        stepped(net, trainer.step)
        if trainer.step == 1:
            values = {parameter: parameter.data for parameter in net.parameters()}
            for parameter in values:
                parameter.data = parameter.grad if parameter.grad is not None else parameter.data
            whole = trainer.parallel.weights(net)
            first = torch.cat([part.flatten() for part in whole.values()]) if whole else first
            for parameter, value in values.items():
                parameter.data = value
    parameters = trainer.parallel.weights(net)
    trainer.close()
    return parameters, first, trainer


def saved(folder: Path, steps: int) -> dict[str, Tensor]:
    path = folder / "digits-0001" / f"step-{steps:010d}"
    return load_file(path / MODEL) | load_file(path / OPTIMIZER)


def check(group: ProcessGroup, name: str, dtype: torch.dtype, by: str, **plan: Any) -> str:
    optimizer = OPTIMIZERS[by]
    single = model(name, dtype)
    steps = 1 if name == "resnet18" else STEPS
    gradient = train_in_one_process(single, data(name, dtype), batch_loss, BATCH, steps, optimizer)
    whole, first, _ = split(group, name, dtype, steps, optimizer, None, **plan)
    off = drift = 0.0
    bound = BOUND[dtype] * (1e3 if by == "Adam" else 10)
    if group.rank == 0:
        off, drift = distance(first, gradient), distance(torch.cat([p.flatten() for p in whole.values()]), flat(single))
        assert off <= BOUND[dtype] and drift <= bound, f"{name} {dtype} {plan}: off by {off:.1e}, then {drift:.1e}"
    return f"{off:.0e}, {steps} steps by {drift:.0e}"


def check_resume(group: ProcessGroup, name: str, by: str, folder: Path, **plan: Any) -> None:
    """Check that a resume is bit-identical with the same split, and equal up to rounding from and to data parallelism."""
    optimizer, double = OPTIMIZERS[by], torch.float64
    uninterrupted, _, _ = split(group, name, double, STEPS, optimizer, folder / "uninterrupted", **plan)
    replicated = {"parallelism": "Data", "shares": None}
    for kind, before, after in (("same", plan, plan), ("to", replicated, plan), ("from", plan, replicated)):
        place = folder / kind
        for steps, how in ((STEPS // 2, before), (STEPS, after)):
            if how is replicated:
                whole = data_parallel(group, name, steps, optimizer, place)
            else:
                whole, _, _ = split(group, name, double, steps, optimizer, place, **how)
        if group.rank == 0:
            error = max(distance(whole[key], uninterrupted[key]) for key in uninterrupted if uninterrupted[key].norm())
            assert error <= (0 if kind == "same" else 1e-9), f"{name} {plan} {kind}: off by {error:.1e}"
    if group.rank == 0:
        split_tensors, replicated_tensors = saved(folder / "same", STEPS), saved(folder / "to", STEPS // 2)
        assert {k: (v.shape, v.dtype) for k, v in split_tensors.items()} == {
            k: (v.shape, v.dtype) for k, v in replicated_tensors.items()
        }


def data_parallel(
    group: ProcessGroup, name: str, steps: int, optimizer: MakeOptimizer, folder: Path
) -> dict[str, Tensor]:
    net = model(name, torch.float64)
    checkpoint = CheckpointRef(directory=str(folder), interval_s=1e6)
    made = make_plan(group.size, global_batch=BATCH, steps=steps, checkpoint=checkpoint)
    trainer = Trainer(made, group, quiet(), torch.device("cpu"), "cpu")
    net, opt = trainer.wrap(net, optimizer(net))
    for x, y in trainer.steps(trainer.loader(data(name, torch.float64))):
        mean_loss(net(x), y).backward()
        opt.step()
    trainer.close()
    return {key: value.detach() for key, value in net.state_dict().items()}


def check_rejections(group: ProcessGroup, folder: Path) -> None:
    for name, plan, words in (
        ("digits-cnn", {"parallelism": "Tensor"}, "found Tensor, with a model without a pair of linear layers"),
        (
            "mlp",
            {"parallelism": "Pipeline"},
            "found 3 layers with parameters; expected at least 4, one per pipeline stage",
        ),
    ):
        if plan["parallelism"] == "Pipeline" and group.size < 4:
            continue
        try:
            split(group, name, torch.float32, 1, OPTIMIZERS["momentum"], folder / f"rejected-{name}", **plan)
        except BadInputError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{name} with {plan} was accepted")


def check_replicas(group: ProcessGroup, pipeline: dict[str, Any], tensor: dict[str, Any], folder: Path) -> None:
    """Replicas of a split model learn the same as one process. Each of their ranks compares its parameters."""
    if "resumes" in sys.argv:
        for plan in (pipeline, tensor):
            check_resume(group, "gpt-mini", "Adam", folder / f"resume-{plan['parallelism']}", **plan)
            print_on_rank_0(group, f"{plan['parallelism']} resumes from checkpoints")
        return
    for plan, names in ((pipeline, ["digits-cnn", "gpt-mini"]), (tensor, ["mlp", "gpt-mini"])):
        for name in names:
            if group.size // REPLICAS > 2 and name == "gpt-mini" and plan is pipeline:
                continue
            text = check(group, name, torch.float64, "momentum" if name == "gpt-mini" else "Adam", **plan)
            print_on_rank_0(group, f"{plan['parallelism']} {name}, {REPLICAS} replicas: gradient off by {text}")
    check_differing_replicas(group, tensor)


def check_differing_replicas(group: ProcessGroup, plan: dict[str, Any]) -> None:
    """Parts of one replica that change are found, although no other rank of this replica has these parts."""

    def change(net: nn.Module, step: int) -> None:
        if step == 2 and group.rank >= group.size // REPLICAS:
            next(parameter for parameter in net.parameters() if parameter.numel()).data.view(-1)[0] += 1

    try:
        split(group, "mlp", torch.float64, STEPS, OPTIMIZERS["momentum"], None, change, **plan)
    except ParametersDivergedError as error:
        assert "after step 2, parameters of rank" in str(error), error
        print_on_rank_0(group, "differing replicas are found")


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    pipeline = {"parallelism": "Pipeline", "micro_batches": 5}
    tensor = {"parallelism": "Tensor", "collective": "Ring"}
    if REPLICAS > 1:
        check_replicas(group, pipeline, tensor, folder)
        group.close()
        return
    for plan, names in ((pipeline, list(MODELS)), (tensor, ["mlp", "lenet", "gpt-mini"])):
        for name in names if group.size == 2 else ["gpt-mini"]:
            for dtype in BOUND if (name, group.size) == ("gpt-mini", 2) else (torch.float64,):
                by = "Adam" if name == "digits-cnn" else "momentum"
                text = check(group, name, dtype, by, **plan)
                print_on_rank_0(group, f"{plan['parallelism']} {name} {dtype}: gradient off by {text}")
    check_rejections(group, folder)
    if group.size == 2:
        for plan in (pipeline, tensor):
            check_resume(group, "gpt-mini", "Adam", folder / f"resume-{plan['parallelism']}", **plan)
            print_on_rank_0(group, f"{plan['parallelism']} resumes from checkpoints")
    group.close()


main()
