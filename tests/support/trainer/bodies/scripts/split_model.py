"""Check on every rank that a script with ``t.create`` and ``t.run`` learns the same under all strategies.

Its weights equal those of one process in float64, also after a stop and a resume under another strategy.

Arguments: ranks, a folder for checkpoints, and the number of replicas of a split model.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import Optimizer

import dltrain
from dlcontract import CheckpointRef, ModelRef, replica_batches
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.reporting.script_reports import set_trainer
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan

STEPS, BATCH, SAMPLES, POSITIONS, WORDS, WIDTH, HEADS = 6, 13, 27, 5, 11, 8, 4
SPLIT: dict[str, dict[str, Any]] = {
    "Pipeline": {"parallelism": "Pipeline", "micro_batches": 3},
    "Tensor": {"parallelism": "Tensor", "collective": "Ring"},
}


class Block(nn.Module):
    """A transformer block with a layer of its own for each of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, WIDTH // HEADS)
        heads = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        y: Tensor = self.norm(x + self.down(gelu(self.up(x))))
        return y


class Net(nn.Module):
    """A small language model with tied weights that have two names, and parameters that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(1, POSITIONS, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        nn.init.trunc_normal_(self.token.weight, std=0.3)
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        y: Tensor = self.token(x) + self.position * self.scale
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y

    def layers(self) -> list[Any]:
        return [(self.embed, self.token, self.position), *self.blocks, self.head]

    def pairs(self) -> list[Any]:
        attention = [((b.query, b.key, b.value), b.out, HEADS) for b in self.blocks if isinstance(b, Block)]
        return attention + [(block.up, block.down) for block in self.blocks]


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.Linear(WIDTH, WORDS)
    ).double()


def with_dropout() -> nn.Module:
    """Return a model whose tensor-parallel ranks must draw equal random numbers, those of one process."""
    return nn.Sequential(*sequence(), nn.Dropout(0.3))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def data() -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(7))
    return x, (x + 1) % WORDS


def optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


class Quiet(RankReporter):
    """A reporter that prints no progress and collects the losses."""

    def __init__(self) -> None:
        super().__init__(None)
        self.rank = 1


def script(t: Trainer, make: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], list[float], float]:
    """Train like a user's script. Return (weights by name on rank 0, losses of all steps, accuracy at the end)."""
    torch.manual_seed(t.rank)  # rank 0 draws the initial values
    samples, losses = data(), []
    model = t.create(make)
    model, opt = t.wrap(model, optimizer(model), sample=samples[0][:2])
    for x, y in t.steps(t.loader(samples)):
        loss = t.run(model, x, y, loss_of)
        t.clip_gradients(0.5)
        opt.step()
        losses.append(t.sum([0.0 if loss is None else float(loss) * len(x), 0.0 if loss is None else len(x)]))
    model.eval()
    found = dltrain.evaluate((t.predict(model, a), b) for a, b in t.held_out(t.loader(samples)))
    assert found is not None and found.language is not None
    assert found.samples == SAMPLES * POSITIONS, f"{found.samples} predictions count"
    weights = {name: value.clone() for name, value in t.parallel.weights(model).items()}
    t.close()
    return weights, [total / count for total, count in losses], found.language.perplexity


def start(group: ProcessGroup, folder: Path | None, steps: int, replicas: int = 1, **plan: Any) -> Trainer:
    parts = group.size // replicas
    if "parallelism" in plan:
        plan |= {"min_ranks": group.size, "replicas": replicas}
        plan["shares"] = [share for share in replica_batches(BATCH, replicas) for _ in range(parts)]
    made = make_plan(
        group.size, global_batch=BATCH, steps=steps, compare_steps=1, bucket_nbytes=4096, segment_nbytes=1024,
        model=ModelRef(command=("train.py",)),
        checkpoint=CheckpointRef(enabled=folder is not None, directory=str(folder), interval_s=1e6), **plan,
    )  # fmt: skip
    t = Trainer(made, group, Quiet(), torch.device("cpu"), "cpu")
    set_trainer(t)
    return t


def check(group: ProcessGroup, alone: ProcessGroup, kind: str, make: Callable[[], nn.Module], replicas: int) -> str:
    expected, losses, perplexity = script(start(alone, None, STEPS), make)
    weights, found, other = script(start(group, None, STEPS, replicas, **SPLIT[kind]), make)
    worst = max(abs(a - b) for a, b in zip(losses, found, strict=True))
    assert worst < 1e-12 and abs(perplexity - other) < 1e-9, f"{kind}: losses off by {worst:.1e}"
    off = 0.0
    if group.rank == 0:
        assert list(weights) == list(expected), f"{list(weights)}; expected {list(expected)}"
        off = max(distance(weights[name], expected[name]) for name in expected)
        assert off < 1e-11, f"{kind}: weights off by {off:.1e}"
    return f"{off:.0e}"


def check_resume(group: ProcessGroup, kind: str, folder: Path, replicas: int) -> None:
    """A run that stops under one strategy and resumes under another has the weights of a run without a stop."""
    expected, _, _ = script(start(group, None, STEPS, replicas, **SPLIT[kind]), Net)
    for name, before, after in (("from", SPLIT[kind], {}), ("to", {}, SPLIT[kind])):
        for steps, plan in ((STEPS // 2, before), (STEPS, after)):
            weights, losses, _ = script(start(group, folder / f"{kind}-{name}", steps, replicas, **plan), Net)
            assert len(losses) == STEPS // 2
        if group.rank == 0:
            off = max(distance(weights[name], expected[name]) for name in expected)
            assert off < 1e-9, f"{kind} {name}: off by {off:.1e}"


def refused(action: Callable[[], object], words: str) -> None:
    try:
        action()
    except MisuseError as error:
        assert words in str(error), f"{error}; expected {words}"
    else:
        raise AssertionError(f"accepted; expected {words}")


class Silent(Net):
    layers = None  # type: ignore[assignment]


class Forgetful(Net):
    def layers(self) -> list[Any]:
        return [(self.embed, self.token), *self.blocks, self.head]


class Partial(Net):
    def layers(self) -> list[Any]:
        return [(self.embed, self.token, self.position), *list(self.blocks)[1:], self.head]


class Twofold(Net):
    def layers(self) -> list[Any]:
        return [(lambda x: (self.embed(x), x), self.token, self.position), *self.blocks, self.head]


def check_misuse(group: ProcessGroup) -> None:
    x, y = data()

    def wrap(make: Callable[[], nn.Module], **plan: Any) -> Callable[[], object]:
        def action() -> None:
            t = start(group, None, 1, **(plan or SPLIT["Pipeline"]))
            model = t.create(make)
            t.wrap(model, optimizer(model), sample=x[:1])

        return action

    refused(wrap(Silent), "found a Silent with parallelism.strategy Pipeline; expected an nn.Sequential, or a model")
    refused(wrap(Forgetful), "found no layer with the parameters position")
    refused(wrap(Partial), "found no layer with the parameters blocks.0.query.weight")
    refused(wrap(Twofold), "found a tuple for one sample; expected one tensor")
    refused(wrap(lambda: nn.BatchNorm1d(3)), "found buffers running_mean")
    t = start(group, None, 1, **SPLIT["Pipeline"])
    net = Net()
    refused(lambda: t.wrap(net, optimizer(net), sample=x), "expected the result of t.create")
    net = t.create(Net)
    refused(lambda: t.wrap(net, optimizer(net)), "t.wrap: sample: found NoneType")
    net, opt = t.wrap(net, optimizer(net), sample=x)
    batch, targets = next(steps := t.steps(t.loader((x, y))))
    refused(lambda: net(batch), "expected t.run(model, x, y, loss)")
    refused(lambda: t.run(net, batch[:, 1:], targets, loss_of), "found samples of shape (4,)")
    refused(lambda: t.run(Net(), batch, targets, loss_of), "which is not the model of t.wrap")
    refused(lambda: t.weigh(3.0), "t.weigh: found a call with parallelism.strategy Pipeline")
    t.run(net, batch, targets, loss_of)
    refused(lambda: t.run(net, batch, targets, loss_of), "found a second call in a step")
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    refused(opt.step, "Clip with t.clip_gradients")
    steps.close()  # type: ignore[attr-defined]
    print_on_rank_0(group, "misuse is rejected")


def main() -> None:
    group, folder, replicas = start_process_group(), Path(sys.argv[2]), int(sys.argv[3])
    alone = group.split(list(range(group.size)))
    for kind in SPLIT:
        for make in (Net, sequence if kind == "Pipeline" else with_dropout) if replicas == 1 else (Net,):
            print_on_rank_0(
                group, f"{kind} {make.__name__}: weights off by {check(group, alone, kind, make, replicas)}"
            )
        check_resume(group, kind, folder, replicas)
        print_on_rank_0(group, f"{kind}: resumes from and to strategy Data")
    if replicas == 1:
        check_misuse(group)
    group.close()


main()
