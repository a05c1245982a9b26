"""Tests of scripts with several models and optimizers, and with parameters of several dtypes."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam

from dltrain.checkpoint.store import MODEL
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.several.exactness import CASES
from support.trainer.bodies.several.killed import KILLED_AT, STEPS
from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, ROOT, command, run, run_ranks

KILLED = BODIES / "several/killed.py"


def one_rank(**plan: Any) -> Trainer:
    made = make_plan(1, global_batch=4, epochs=1, **plan)
    return Trainer(made, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")


def of_two_ranks(**plan: Any) -> Trainer:
    """Return a trainer with a plan of two ranks, whose ``t.wrap`` raises before ranks communicate."""
    made = make_plan(2, global_batch=4, epochs=1, **plan)
    return Trainer(made, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_scripts_equal_one_process(ranks: int) -> None:
    """Local batches differ, some ranks do not use some parameters, and updates differ in number and order."""
    ended = run_ranks(ranks, BODIES / "several/exactness.py", str(ranks), timeout_s=120)
    assert re.findall(r"(.+): off by", ended.output) == list(CASES), ended.output


@pytest.mark.mpi
def test_killed_gan_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A rank is killed after the update of the discriminator, so the whole step is computed again."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(command(2, KILLED, "2", killed, "kill"), 120).code != 0
    again = run_ranks(2, KILLED, "2", killed).output
    resumed = re.search(r"resumed from step (\d+) in", again)
    assert resumed is not None and 0 < int(resumed[1]) <= KILLED_AT, again
    expected = run_ranks(2, KILLED, "2", whole).output
    (found,) = re.findall(r"state .* after \d+ steps", again)
    assert found in expected and f"after {STEPS} steps" in found, (again, expected)
    names = load_file(max((whole / "digits-0001").glob("step-*")) / MODEL).keys()
    assert {name.partition(".")[0] for name in names} == {"0", "1"}, names


@pytest.mark.mpi
def test_lost_rank_ends_the_attempt_because_a_step_cannot_be_undone(tmp_path: Path) -> None:
    """The plan allows fewer ranks. The first update of a step changes parameters, so the ranks restart."""
    ended = run(command(2, KILLED, "2", tmp_path, "kill", ulfm=True), 120)
    assert ended.code != 0 and "continue from step" not in ended.output, ended.output
    again = run_ranks(3, KILLED, "3", tmp_path).output
    assert "resumed from step" in again and f"after {STEPS} steps" in again, again


@pytest.mark.mpi
def test_ranks_continue_without_a_lost_one_with_parameters_of_two_dtypes() -> None:
    ended = run(command(3, BODIES / "several/elastic.py", "3", ulfm=True), 120)
    assert "ranks (0, 2) continue from step 4" in ended.output and "off by" in ended.output, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("flag", "expected"),
    [("other", r"spec\.optimizer: found Adam; expected an optimizer with the options"), ("swapped", "another model")],
)
def test_checkpoint_of_other_models_or_optimizers_is_refused(flag: str, expected: str, tmp_path: Path) -> None:
    run_ranks(1, KILLED, "1", tmp_path)
    ended = run(command(1, KILLED, "1", tmp_path, flag), 60)
    assert ended.code != 0 and re.search(expected, ended.output), ended.output


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_example_trains(ranks: int) -> None:
    script = ROOT / "examples/scripts/train_gan.py"
    arguments = [sys.executable, str(script)] if ranks == 1 else command(ranks, script, fresh=True)
    ended = run(arguments, OMP_NUM_THREADS="1")
    assert ended.code == 0 and "finished 120 steps" in ended.output, ended.output


def two_models() -> tuple[nn.Module, nn.Module, SGD, Adam]:
    gen, disc = nn.Linear(3, 3), nn.Linear(3, 1)
    return gen, disc, SGD(gen.parameters(), 0.1), Adam(disc.parameters(), 0.1)


def test_result_has_the_form_of_the_arguments() -> None:
    gen, disc, gen_opt, disc_opt = two_models()
    assert one_rank().wrap([gen, disc], [gen_opt, disc_opt]) == ([gen, disc], [gen_opt, disc_opt])
    gen, disc, gen_opt, disc_opt = two_models()
    assert one_rank().wrap((gen, disc), (gen_opt, disc_opt)) == ((gen, disc), (gen_opt, disc_opt))
    both = nn.ModuleList([gen, disc])
    assert one_rank().wrap(both, [gen_opt, disc_opt]) == (both, [gen_opt, disc_opt])
    opt = SGD(both.parameters(), 0.1)
    assert one_rank().wrap([gen, disc], opt) == ([gen, disc], opt)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "strategy": (
        lambda: of_two_ranks(parallelism="Optimizer", collective="Ring").wrap(*pairs()),
        r"models: found 2 with spec\.parallelism\.strategy Optimizer; expected Data",
    ),
    "servers": (
        lambda: of_two_ranks(collective="LayeredServer", shares=[0, 4]).wrap(*pairs()),
        r"optimizers: found 2 with spec\.collective LayeredServer",
    ),
    "compression": (
        lambda: one_rank(compression="BF16").wrap(*pairs()),
        r"spec\.gradientCompression: found BF16 with several optimizers",
    ),
    "empty": (lambda: one_rank().wrap([], []), r"model: found an empty list"),
    "twice": (lambda: one_rank().wrap([(gen := nn.Linear(1, 1)), gen], []), r"the same object twice|empty list"),
    "kind": (lambda: one_rank().wrap([nn.Linear(1, 1), 3], pairs()[1]), r"model: found builtins.int"),
    "shared": (
        lambda: one_rank().wrap(model := nn.Linear(2, 1), [SGD(model.parameters(), 0.1), Adam([model.bias], 0.1)]),
        r"found a parameter of shape \(1,\) in optimizers 0 and 1 of the list",
    ),
    "frozen": (
        lambda: one_rank().wrap(
            model := nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)]),
            [SGD(model[0].parameters(), 0.1), SGD(model[1].parameters(), 0.1)],
        ),
        "no trainable parameter in optimizer 1 of the list",
    ),
    "outside": (lambda: one_rank().wrap(pairs()[0][:1], pairs()[1]), "not the model's"),
}


def pairs() -> tuple[list[nn.Module], list[Any]]:
    gen, disc, gen_opt, disc_opt = two_models()
    return [gen, disc], [gen_opt, disc_opt]


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_of_wrap_are_refused(name: str) -> None:
    call, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected):
        call()


def train(loop: Callable[[Trainer, Any], None], **plan: Any) -> None:
    """Run ``loop(trainer, (gen, disc, gen_opt, disc_opt, x))`` for each batch of one rank."""
    trainer, (gen, disc, gen_opt, disc_opt) = one_rank(**plan), two_models()
    trainer.wrap([gen, disc], [gen_opt, disc_opt])
    for (x,) in trainer.steps(trainer.loader((torch.rand(12, 3),)), accumulate="micro_batches" in plan):
        loop(trainer, (gen, disc, gen_opt, disc_opt, x))
    trainer.close()


def clips_before_the_reduction(t: Trainer, of: Any) -> None:
    of[0](of[4]).square().mean().backward()
    nn.utils.clip_grad_norm_(of[0].parameters(), 1e-3)
    of[2].step()


def clips_without_optimizer(t: Trainer, of: Any) -> None:
    of[0](of[4]).square().mean().backward()
    t.clip_gradients(1.0)


def clips_with_another_optimizer(t: Trainer, of: Any) -> None:
    of[0](of[4]).square().mean().backward()
    t.clip_gradients(1.0, SGD(of[0].parameters(), 0.1))


def adds_after_clipping(t: Trainer, of: Any) -> None:
    of[1](of[4]).square().mean().backward()
    t.clip_gradients(1.0, of[3])
    of[1](of[0](of[4])).square().mean().backward()
    of[3].step()


def adds_parameters(t: Trainer, of: Any) -> None:
    of[2].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    of[2].step()


def makes_no_update(t: Trainer, of: Any) -> None:
    of[0](of[4]).square().mean().backward()


def updates_only_at_the_end(t: Trainer, of: Any) -> None:
    of[1](of[0](of[4])).square().mean().backward()
    of[3].step()
    if t.end_of_step:
        of[2].step()


def weighs_tokens(t: Trainer, of: Any) -> None:
    t.weigh(2)


def updates_twice_in_a_micro_batch(t: Trainer, of: Any) -> None:
    for _ in range(2):
        of[1](of[0](of[4])).square().mean().backward()
        of[3].step()


WRONG: dict[str, tuple[Callable[[Trainer, Any], None], str, dict[str, Any]]] = {
    "clip": (clips_before_the_reduction, r"ranks sum the gradients only in opt\.step.*t\.clip_gradients", {}),
    "no optimizer": (clips_without_optimizer, r"t\.clip_gradients: optimizer: found no optimizer", {}),
    "another optimizer": (clips_with_another_optimizer, "found a SGD that t.wrap does not know", {}),
    "added": (adds_after_clipping, r"between t\.clip_gradients \(or scaler\.unscale_\) and opt\.step\(\)", {}),
    "late": (
        adds_parameters,
        r"parameters of shapes \[\(2,\)\] that the model did not have in t\.wrap \(of several",
        {},
    ),
    "no update": (makes_no_update, r"found no opt\.step\(\)", {}),
    "only at the end": (updates_only_at_the_end, "found 1 calls in 2 micro-batches", {"micro_batches": 2}),
    "tokens": (weighs_tokens, r"t\.weigh: found a call in a micro-batch with several", {"micro_batches": 2}),
    "twice": (updates_twice_in_a_micro_batch, "found 2 calls in 1 micro-batches", {"micro_batches": 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_loop_that_ranks_cannot_follow_is_refused(name: str) -> None:
    loop, expected, plan = WRONG[name]
    with pytest.raises(MisuseError, match=expected):
        train(loop, **plan)


def test_second_call_of_wrap_names_the_lists() -> None:
    trainer, (gen, disc, gen_opt, disc_opt) = one_rank(), two_models()
    trainer.wrap(gen, gen_opt)
    with pytest.raises(MisuseError, match=r"t\.wrap: found a second call.*t\.wrap\(\[gen, disc\]"):
        trainer.wrap(disc, disc_opt)


def test_optimizers_of_the_list_are_known() -> None:
    """No warning names them as optimizers whose gradients ranks do not sum."""
    steps: list[int] = []

    def loop(t: Trainer, of: Any) -> None:
        of[1](of[0](of[4])).square().mean().backward()
        of[2].step()
        of[3].step()
        steps.append(t.step)

    train(loop)
    assert steps == [0, 1, 2], "the step ends after the loop's body"
