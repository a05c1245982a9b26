"""Scripts with several optimizers, or parameters of several dtypes, on all ranks and in one process.

Argument: the number of ranks, which have local batches of different sizes. Rank 0 prints how far each script is off.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, equal_on_all, flat, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan

STEPS, SAMPLES, WIDTH = 8, 60, 6


class Alone:
    """The calls of a ``Trainer``, as a script in one process would make them."""

    rank, size, step = 0, 1, 0

    def __init__(self, batch: int) -> None:
        self._batch, self._schedules = batch, list[StepLR]()

    def wrap(self, models: Any, optimizers: Any) -> tuple[Any, Any]:
        return models, optimizers

    def schedule(self, scheduler: StepLR) -> None:
        self._schedules.append(scheduler)

    def loader(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return data

    def steps(self, data: tuple[Tensor, ...], *, accumulate: bool = False) -> Iterator[list[Tensor]]:
        sampler = Sampler(SAMPLES, self._batch, 0)
        for self.step in range(STEPS):
            chosen = torch.from_numpy(sampler.part(self.step, [1], 0).indices)
            yield [part[chosen] for part in data]
            for scheduler in self._schedules:
                scheduler.step()

    def clip_gradients(self, max_norm: float, optimizer: Optimizer) -> float:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def log(self, loss: Tensor) -> None:
        pass

    def weigh(self, tokens: float) -> None:
        pass


def network(outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, outputs))


def adversaries(t: Any) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    """Return generator, discriminator and their optimizers, wrapped."""
    gen, disc = network(WIDTH, 1), network(1, 2)
    of_gen, of_disc = Adam(gen.parameters(), 0.02, betas=(0.5, 0.9)), SGD(disc.parameters(), 0.05, momentum=0.9)
    (gen, disc), (of_gen, of_disc) = t.wrap([gen, disc], [of_gen, of_disc])
    return gen, disc, of_gen, of_disc


def judge(scores: Tensor, real: float) -> Tensor:
    return cross_entropy(scores, torch.full_like(scores, real))


def discriminator_first(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """The order of PyTorch's DCGAN tutorial: two backward passes add up in the discriminator."""
    gen, disc, of_gen, of_disc = adversaries(t)
    t.schedule(StepLR(of_gen, 3))
    t.schedule(StepLR(of_disc, 2, 0.5))
    ema = AveragedModel(gen, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for real, noise in t.steps(t.loader(data)):
        disc.zero_grad()
        loss = judge(disc(real), 1.0)
        t.log(loss=loss)
        loss.backward()
        fake = gen(noise)
        judge(disc(fake.detach()), 0.0).backward()
        t.clip_gradients(0.3, of_disc)
        of_disc.step()
        gen.zero_grad()
        judge(disc(fake), 1.0).backward()
        assert t.clip_gradients(0.2, of_gen) > 0
        of_gen.step()
        ema.update_parameters(gen)
    return [gen, disc, ema]


def generator_first(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """The loss of the generator leaves gradients in the discriminator, which ``zero_grad`` discards in two ways."""
    gen, disc, of_gen, of_disc = adversaries(t)
    for real, noise in t.steps(t.loader(data)):
        of_gen.zero_grad(set_to_none=False)
        fake = gen(noise)
        judge(disc(fake), 1.0).backward()
        of_gen.step()
        of_disc.zero_grad(set_to_none=t.step % 2 == 0)
        (judge(disc(real), 1.0) + judge(disc(fake.detach()), 0.0)).backward()
        of_disc.step()
    return [gen, disc]


def several_updates(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """The critic of a Wasserstein GAN has three updates per batch, and its generator one every second batch."""
    gen, disc, of_gen, of_disc = adversaries(t)
    for real, noise in t.steps(t.loader(data)):
        for _ in range(3):
            of_disc.zero_grad()
            (disc(gen(noise).detach()).mean() - disc(real).mean()).backward()
            of_disc.step()
            with torch.no_grad():
                for parameter in disc.parameters():
                    parameter.clamp_(-0.3, 0.3)
        if t.step % 2:
            for parameter in disc.parameters():
                parameter.requires_grad_(False)
            of_gen.zero_grad()
            (-disc(gen(noise)).mean()).backward()
            of_gen.step()
            for parameter in disc.parameters():
                parameter.requires_grad_(True)
    return [gen, disc]


def two_rates(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """One model and one loss, with an optimizer for its sparse and another for its dense parameters."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"table": nn.Embedding(5, WIDTH, sparse=True), "head": nn.Linear(WIDTH, 1)})
    sparse, dense = SGD(model["table"].parameters(), 0.5), Adam(model["head"].parameters(), 0.01)
    model, (sparse, dense) = t.wrap(model, [sparse, dense])
    for real, _ in t.steps(t.loader(data)):
        rows = model["table"]((real[:, 0].abs() * 10).long() % 5)
        model["head"](rows + real).square().mean().backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
    return [model]


class Branches(nn.Module):
    """A layer for all samples, another for few of them, and a third that no sample uses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.main, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.main(x)
        chosen = (x[:, 0] > 1.0).nonzero()[:, 0]
        if len(chosen):
            y = y.index_add(0, chosen, self.rare(x[chosen].to(self.rare.weight.dtype)).to(y.dtype))
        return y


def unused(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """In some steps, only some ranks use a branch, with momentum that must not move unused parameters."""
    model, disc = Branches(), network(1, 2)
    one, other = SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1), Adam(disc.parameters(), 0.01)
    (model, disc), (one, other) = t.wrap([model, disc], [one, other])
    for real, _ in t.steps(t.loader(data)):
        one.zero_grad()
        other.zero_grad()
        disc(model(real)).square().mean().backward()
        one.step()
        other.step()
    return [model, disc]


def of_dtypes(dtype: torch.dtype) -> Callable[[Any, tuple[Tensor, ...]], list[nn.Module]]:
    def train(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
        """One optimizer for parameters of two dtypes, with a branch that some ranks do not use."""
        model, head = Branches(dtype), nn.Linear(WIDTH, 1).to(dtype)
        whole = nn.ModuleList([model, head])
        opt = SGD(whole.parameters(), 0.1, momentum=0.5)
        whole, opt = t.wrap(whole, opt)
        for real, _ in t.steps(t.loader(data)):
            opt.zero_grad()
            head(model(real).to(dtype)).float().square().mean().backward()
            t.clip_gradients(0.5, opt)
            opt.step()
        assert head.weight.grad.dtype == head.weight.dtype == dtype
        return [whole]

    return train


def accumulating(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """Two models that do not use each other, so that micro-batches change no gradient."""
    one, other, of_one, of_other = adversaries(t)
    for real, noise in t.steps(t.loader(data), accumulate=True):
        of_one.zero_grad()
        one(real).square().mean().backward()
        of_one.step()
        of_other.zero_grad()
        other(one(noise).detach() * 0 + noise).square().mean().backward()
        t.clip_gradients(0.05, of_other)
        of_other.step()
    return [one, other]


def weighed(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """Each model's loss is a mean over some of the samples, whose number differs between ranks."""
    gen, disc, of_gen, of_disc = adversaries(t)
    for real, noise in t.steps(t.loader(data)):
        for model, opt, x in ((gen, of_gen, real[real[:, 1] > 0]), (disc, of_disc, noise[noise[:, 1] > -0.5])):
            opt.zero_grad()
            t.weigh(len(x))
            model(x).square().mean().backward()
            opt.step()
    return [gen, disc]


def scaled(t: Any, data: tuple[Tensor, ...]) -> list[nn.Module]:
    """A GradScaler for two optimizers. A gradient of one that is infinite on one rank is left out on all."""
    gen, disc, of_gen, of_disc = adversaries(t)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for real, noise in t.steps(t.loader(data)):
        of_gen.zero_grad()
        of_disc.zero_grad()
        scores = disc(real)
        too_large = bool((real[:, 2] > 1.5).any())
        scores.register_hook(lambda g, too_large=too_large: g * (torch.inf if too_large else 1.0))
        scaler.scale(judge(scores, 1.0)).backward()
        scaler.scale(gen(noise).square().mean()).backward()
        scaler.unscale_(of_disc)
        scaler.unscale_(of_gen)
        scaler.step(of_disc)
        scaler.step(of_gen)
        scaler.update()
    return [gen, disc]


class Case(NamedTuple):
    train: Callable[[Any, tuple[Tensor, ...]], list[nn.Module]]
    bound: float = 2e-6
    """Maximum relative distance of the parameters from those of one process."""
    plan: dict[str, Any] = {}


CASES = {
    "discriminator first": Case(discriminator_first),
    "generator first": Case(generator_first),
    "several updates": Case(several_updates),
    "two rates": Case(two_rates),
    "unused": Case(unused),
    "float64": Case(of_dtypes(torch.float64)),
    "bfloat16": Case(of_dtypes(torch.bfloat16), 2.0**-7),  # an update rounds to 8 bits
    "accumulating": Case(accumulating, plan={"micro_batches": 3}),
    "weighed": Case(weighed),
    "scaled": Case(scaled),
    "measured": Case(discriminator_first, plan={"measure_collective": True}),
    "of torch": Case(generator_first, plan={"collective": "DDP", "measure_collective": False}),
}


def run_case(group: ProcessGroup, name: str, case: Case, data: tuple[Tensor, ...]) -> None:
    shares = [5 + 2 * rank for rank in range(group.size)]
    whole = case.train(Alone(sum(shares)), data)
    plan = {"collective": "Ring", "segment_nbytes": 1024} | case.plan
    made = make_plan(shares=shares, global_batch=sum(shares), steps=STEPS, **plan)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    found = case.train(trainer, data)
    assert trainer.step == trainer.total_steps == STEPS, trainer.step
    trainer.close()
    for model in found:
        equal_on_all(group, model)
    off = max(distance(flat(a), flat(b)) for a, b in zip(found, whole, strict=True))
    print_on_rank_0(group, f"{name}: off by {off:.1e}")
    assert off <= case.bound, (name, off)
    assert (0 < trainer._loss_scale.skipped < 2 * STEPS) == (case.train is scaled), trainer._loss_scale.skipped


def main() -> None:
    group = start_process_group()
    generator = torch.Generator().manual_seed(7)
    data = (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator))
    for name, case in CASES.items():
        run_case(group, name, case, data)
    group.close()


if __name__ == "__main__":
    main()
