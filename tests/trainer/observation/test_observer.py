"""Tests of the observer: real scripts, which are not changed, in processes of their own as rank 0 starts them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain.protocol.rank_messages import Observed
from support.trainer.listener import Listener
from support.trainer.observed_scripts import MLP, WITHIN_S, loop, observed, python, variables

GIVEN_UP = "dljob: did not observe the structure of this script"


@pytest.mark.parametrize("fresh", [False, True], ids=["fork of the zygote", "interpreter"])
def test_costs_of_a_perceptron_are_those_of_its_layers(tmp_path: Path, fresh: bool) -> None:
    found, ended = observed(tmp_path, loop(), fresh=fresh)
    first, last = found[0], found[-1]
    assert first.parameters == 20 * 64 + 64 + 64 * 2 + 2
    assert (first.samples, first.sample_nbytes, first.optimizer_slots) == (32, 80, 1)
    forward = 2 * 32 * (20 * 64 + 64 * 2)
    assert first.flops == pytest.approx(3 * forward)
    work = {each.kind: each for each in first.work}
    assert {kind: each.count for kind, each in work.items()} == {"product": 2, "other": 1}
    assert work["product"].forward_flops == forward and work["other"].forward_flops == 0
    assert work["product"].moved_nbytes == 32 * 4 * (3 * 20 + 2 * 64 + 3 * 64 + 2 * 2)
    assert work["other"].moved_nbytes == 32 * 4 * 4 * 64
    # The input is no result of an operation. The output of the ReLU and that of the model are kept.
    assert 32 * 4 * (64 + 2) <= first.activation_nbytes <= 32 * 4 * (64 + 64 + 2)
    assert (first.steps, first.step_s, first.world_size) == (3, None, 1)
    assert last.steps == 30 and last.step_s is not None and 0 < last.step_s < 1
    assert ended.stderr.count("\n") == 1 and "DLJOB_OBSERVE=off" in ended.stderr


def test_script_computes_the_same_as_without_the_observer(tmp_path: Path) -> None:
    script = loop(
        model="model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))",
        batch="x = torch.randn(8, 3, 8, 8); y = torch.randint(5, (8,))",
        optimizer="AdamW(model.parameters())",
    )
    found, ended = observed(tmp_path, script)
    assert ended.stdout == python(script, None).stdout and "parameters" in ended.stdout
    convolution, linear = 2 * 8 * 36 * 4 * 27, 2 * 8 * 144 * 5
    work = {each.kind: each for each in found[0].work}
    assert {kind: each.count for kind, each in work.items()} == {"convolution": 1, "product": 1, "other": 2}
    assert (work["convolution"].forward_flops, work["product"].forward_flops) == (convolution, linear)
    assert (found[0].optimizer_slots, found[0].sample_nbytes) == (2, 3 * 8 * 8 * 4)


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    script = loop(after="for _ in range(2): nn.functional.cross_entropy(model(x), y).backward()")
    found, _ = observed(tmp_path, script)
    assert found[0].samples == 3 * 32 and found[0].flops == pytest.approx(9 * 2 * 32 * (20 * 64 + 64 * 2))
    alone, _ = observed(tmp_path, loop())
    # Fixed bug: the activations of the micro-batches were added up. The outputs of earlier ones may still exist.
    assert alone[0].activation_nbytes <= found[0].activation_nbytes <= alone[0].activation_nbytes + 2 * 32 * 2 * 4


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, 2)
    def forward(self, x):
        return self.out(checkpoint(self.a, x, use_reentrant={reentrant}))
model = Model()
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_one_more_forward_pass(tmp_path: Path, reentrant: bool) -> None:
    """Fixed bug: the repeated forward pass counted with a backward pass of its own, and its activations as kept."""
    batch = "x = torch.randn(32, 20, requires_grad=True); y = torch.randint(2, (32,))"
    found, _ = observed(tmp_path, loop(model=CHECKPOINTED.format(reentrant=reentrant), batch=batch))
    again, out = 2 * 32 * (20 * 64 + 64 * 64), 2 * 32 * 64 * 2
    assert found[0].flops == pytest.approx(4 * again + 3 * out)
    work = {each.kind: each for each in found[0].work}
    assert {kind: each.count for kind, each in work.items()} == {"product": 3, "other": 2}
    assert work["product"].forward_flops == again + out
    assert (found[0].samples, found[0].sample_nbytes) == (32, 80)
    assert found[0].activation_nbytes < 32 * 4 * (64 + 64 + 2), "the first layer's output is not kept"


def test_module_that_is_recomputed_as_a_whole_has_samples(tmp_path: Path) -> None:
    """With ``use_reentrant=True``, the first forward pass has no gradients, so that only the recomputation shows what
    is trained. Otherwise, torch stops the recomputation before the last layer, whose output no gradient needs.
    """
    model = MLP + "\nfrom torch.utils.checkpoint import checkpoint"
    batch = "x = torch.randn(32, 20, requires_grad=True); y = torch.randint(2, (32,))"
    loss = "nn.functional.cross_entropy(checkpoint(model, x, use_reentrant={}), y)"
    for reentrant, again in ((False, 20 * 64), (True, 20 * 64 + 64 * 2)):
        found, _ = observed(tmp_path, loop(model=model, batch=batch, loss=loss.format(reentrant)))
        assert found[0].samples == 32
        assert found[0].flops == pytest.approx(2 * 32 * (3 * (20 * 64 + 64 * 2) + again))


def test_batch_is_found_among_keyword_arguments_and_attention_is_counted(tmp_path: Path) -> None:
    model = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, *, ids, labels):
        h = self.words(ids).unsqueeze(1)
        h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True).squeeze(1)
        return nn.functional.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())
model = Model()
"""
    found, _ = observed(
        tmp_path, loop(model=model, batch="ids = torch.randint(11, (4, 6))", loss="model(ids=ids, labels=ids)")
    )
    assert (found[0].samples, found[0].sample_nbytes) == (4, 6 * 8)
    trained = 1.0  # All parameters are trained.
    assert found[0].flops == pytest.approx((2 + trained) * 2 * 4 * (6 * 8 * 11 + 2 * 6 * 6 * 8))


@pytest.mark.long
def test_recurrent_layers_and_frozen_parameters_count(tmp_path: Path) -> None:
    model = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.rnn = nn.Linear(20, 16).requires_grad_(False), nn.LSTM(4, 8, batch_first=True)
        self.out = nn.Linear(8, 2)
    def forward(self, x):
        return self.out(self.rnn(self.frozen(x).reshape(-1, 4, 4))[0][:, -1])
model = Model()
"""
    optimizer = "SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)"
    found, _ = observed(tmp_path, loop(model=model, optimizer=optimizer))
    frozen, rnn, out = 20 * 16 + 16, 4 * 8 * (4 + 8 + 2), 8 * 2 + 2
    assert (found[0].parameters, found[0].optimizer_slots) == (rnn + out, 0)
    forward = 2 * 32 * (20 * 16 + 4 * 4 * 8 * (4 + 8) + 8 * 2)
    assert found[0].flops == pytest.approx(forward * (2 + (rnn + out) / (rnn + out + frozen)))
    assert found[0].frozen_nbytes == 4 * frozen


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (loop(after="torch.set_grad_enabled(False); model.eval()(x); model.train(); torch.set_grad_enabled(True)"),
         "evaluates the model"),
        pytest.param(
            loop(model="w = nn.Parameter(torch.zeros(20, 2)); model = nn.ParameterList([w])",
                 loss="nn.functional.cross_entropy(x @ w, y)"),
            "found no call of a torch.nn.Module", marks=pytest.mark.long),
        pytest.param(
            loop(model="model = nn.Embedding(9, 2)", batch="x = torch.randint(9, (4,)); y = torch.randint(2, (4,))"),
            "found no products of matrices", marks=pytest.mark.long),
        # Fixed bug: nothing was said of scripts that update the parameters themselves.
        (loop(optimizer="SGD(model.parameters(), lr=0.1); opt.step = lambda: [p.data.sub_(0.1 * p.grad) for p in model.parameters()]"),
         "ended after 0 updates by optimizers of torch.optim"),
    ],
    ids=["evaluation", "no module", "no products", "no optimizer"],
)  # fmt: skip
def test_observer_gives_up_with_one_line(tmp_path: Path, script: str, reason: str) -> None:
    found, ended = observed(tmp_path, script)
    assert found == [] and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(GIVEN_UP) and reason in ended.stderr
    assert ended.stdout == python(script, None).stdout


def test_evaluation_after_one_step_delays_the_observation(tmp_path: Path) -> None:
    after = "(torch.set_grad_enabled(False), model.eval()(x), model.train(), torch.set_grad_enabled(True)) if step == 1 else 0"
    found, _ = observed(tmp_path, loop(after=after))
    assert found[0].steps == 4 and found[0].samples == 32


@pytest.mark.long
def test_script_may_use_modes_hooks_and_transforms_of_torch(tmp_path: Path) -> None:
    """They would fail, or end in the wrong order, if the observer's modes overlapped with theirs."""
    model = """
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
class Mine(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Mine.calls += 1
        return func(*args, **(kwargs or {}))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = checkpoint(lambda v: torch.relu(self.a(v)), x, use_reentrant=False)
        each = vmap(grad(lambda v: self.a(v).sum()))(x)
        return self.b(h) + 0 * each.sum()
model = Model()
counter = Mine()
counter.__enter__()
"""
    script = (
        loop(model=model, after="counter.__exit__(None, None, None); counter.__enter__()")
        + "counter.__exit__(None, None, None)\nprint('calls', Mine.calls)\n"
    )
    found, ended = observed(tmp_path, script)
    assert found and found[0].samples == 32
    assert ended.stdout == python(script, None).stdout


OTHER = loop(model="model = nn.Linear(20, 2)")
STARTED = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {!r}], check=True)\n"


def test_processes_that_the_script_starts_do_not_report(tmp_path: Path) -> None:
    """Fixed bug: they inherited the agent's request, and the structure of the last one replaced that of the rank."""
    found, ended = observed(tmp_path, loop() + STARTED.format(OTHER))
    assert ended.stdout.count("parameters") == 2 and ended.stderr.count("observed a step") == 1
    assert {each.parameters for each in found} == {20 * 64 + 64 + 64 * 2 + 2}


@pytest.mark.parametrize(
    "start",
    [STARTED, "import os, sys\nimport torch\nos.execv(sys.executable, [sys.executable, '-c', {!r}])"],
    ids=["a wrapper without torch", "exec"],
)
def test_script_behind_a_wrapper_is_observed(tmp_path: Path, start: str) -> None:
    found, _ = observed(tmp_path, start.format(OTHER), fresh=True)
    assert found[-1].parameters == 20 * 2 + 2


def test_errors_of_the_script_are_its_own(tmp_path: Path) -> None:
    """A script that catches an error in its forward pass, as those do that search the largest batch, goes on."""
    model = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.calls = nn.Linear(20, 2), 0
    def forward(self, x):
        self.calls += 1
        if self.calls in (3, 4):
            raise MemoryError("too large")
        return self.a(x)
model = Model()
def trained(x, y):
    while True:
        try:
            return nn.functional.cross_entropy(model(x), y)
        except MemoryError:
            pass
"""
    found, ended = observed(tmp_path, loop(model=model, loss="trained(x, y)"))
    assert found and ended.stderr.count("\n") == 1
    broken = python(loop(loss="model(y)"), str(tmp_path / "nothing"))
    assert broken.returncode == 1 and "RuntimeError" in broken.stderr and "dljob: " not in broken.stderr


@pytest.mark.parametrize("script", ["print('done')", "import json\nprint('done')"])
def test_script_without_torch_starts_as_before(tmp_path: Path, script: str) -> None:
    checked = script + "\nimport sys\nassert 'torch' not in sys.modules"
    found, ended = observed(tmp_path, checked, fresh=True)
    assert (found, ended.stdout, ended.stderr) == ([], "done\n", "")


def test_lost_agent_does_not_matter(tmp_path: Path) -> None:
    ended = python(loop(), str(tmp_path / "nobody"))
    assert ended.returncode == 0 and "parameters" in ended.stdout and "Traceback" not in ended.stderr


def test_rank_0_of_a_distributed_script_is_observed(tmp_path: Path) -> None:
    """``examples/scripts/train_torchrun.py`` with two ranks over gloo, as plain torchrun would start it."""
    script = Path(__file__).resolve().parents[3] / "examples/scripts/train_torchrun.py"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with Listener(tmp_path) as agent:
        ranks = []
        for rank in range(2):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            environ = variables(agent.path if rank == 0 else None, **{k: str(v) for k, v in names.items()})
            environ |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
            ranks.append(
                subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True)
            )
        outputs = [rank.communicate(timeout=WITHIN_S)[0] for rank in ranks]
        assert "world size 2, accuracy " in outputs[0]
        agent.wait_for(Observed, 2)
        agent.wait_for_ends()
        last = max((message.structure for message in agent.of(Observed)), key=lambda each: each.steps)
    assert (last.parameters, last.samples, last.world_size) == (20 * 64 + 64 + 64 * 2 + 2, 64, 2)
    assert last.flops == pytest.approx(3 * 2 * 64 * (20 * 64 + 64 * 2)) and last.steps == 20 * 16
    assert last.step_s is not None and last.step_s > 0


HOOKS = """
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
class Watched(nn.Linear):
    modes = []
    def forward(self, x):
        Watched.modes.append(_get_current_dispatch_mode() is not None)
        return super().forward(x)
def left():
    return len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), sum(Watched.modes[-5:])
"""


def test_nothing_remains_after_giving_up(tmp_path: Path) -> None:
    evaluation = "torch.set_grad_enabled(False); model.eval()(x); model.train(); torch.set_grad_enabled(True)"
    script = loop(model=HOOKS + "model = Watched(20, 2)", after=evaluation) + "\nprint(left(), any(Watched.modes))"
    _, ended = observed(tmp_path, script)
    assert GIVEN_UP in ended.stderr and "(0, 0, 0) True" in ended.stdout


def test_no_hook_remains_if_the_script_updates_within_forward_passes(tmp_path: Path) -> None:
    model = (
        HOOKS
        + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Watched(20, 2)
    def forward(self, x, y):
        loss = nn.functional.cross_entropy(self.a(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        return torch.zeros((), requires_grad=True)
model = Model()
"""
    )
    _, ended = observed(tmp_path, loop(model=model, loss="model(x, y)") + "\nprint(left())")
    assert "updates the model within a forward pass" in ended.stderr and "(0, 0, 0)" in ended.stdout


def test_observation_ends_if_the_first_optimizer_is_not_used_again(tmp_path: Path) -> None:
    """Another optimizer continues, such as in the next stage of the training. It must not be slowed down for long."""
    model = (
        HOOKS
        + """
import sys, time
observer = sys.modules["dltrain.observation.observer"]
observer.LIMIT_S = 0.2
model = Watched(20, 2)
"""
    )
    # The limit is longer on a busy machine, where the first steps take longer.
    wait = "step > 1 and any(left()) and time.sleep(0.1)"
    after = f"opt = torch.optim.SGD(model.parameters(), 0.1) if step == 1 else opt; {wait}"
    _, ended = observed(tmp_path, loop(model=model, after=after, steps=600) + "\nprint(left())")
    assert "was not updated again" in ended.stderr and "(0, 0, 0)" in ended.stdout


@pytest.mark.long
def test_data_loaders_that_are_forked_from_an_observed_step_are_not_observed(tmp_path: Path) -> None:
    after = """if step == 2:
        import os
        if (child := os.fork()) == 0:
            model(x)
            modes = sum(Watched.modes[-1:])
            os._exit(10 + len(hooks._global_forward_hooks) + modes)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    found, ended = observed(tmp_path, loop(model=HOOKS + "model = Watched(20, 2)", after=after))
    assert found and "child 10\n" in ended.stdout


@pytest.mark.parametrize(
    "function",
    [
        "compiled = torch.compile(torch.sin, backend='aot_eager')",
        pytest.param("compiled = None", marks=pytest.mark.long),
    ],
    ids=["before", "within the observed step"],
)
def test_torch_compiles_what_is_first_called_in_an_observed_step(tmp_path: Path, function: str) -> None:
    """It would otherwise never compile it, because a mode was active then."""
    model = f"""
{function}
class Model(nn.Linear):
    def forward(self, x):
        global compiled
        h = super().forward(x)
        if step < 2:
            return h
        compiled = compiled or torch.compile(torch.sin, backend="aot_eager")
        return compiled(h)
model = Model(20, 2)
"""
    script = loop(model=model) + "\nfrom torch._dynamo.utils import counters\nprint(counters['stats']['unique_graphs'])"
    _, ended = observed(tmp_path, script)
    assert ended.stdout == python(script, None).stdout and ended.stdout.endswith("\n1\n")
