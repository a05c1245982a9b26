"""Tests of ``t.wrap(…, save="trained")``: checkpoints without frozen parameters, and the base that a resume needs."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlcontract import CheckpointRef, ModelRef
from dltrain.checkpoint import memory_copy
from dltrain.checkpoint.store import MODEL, OPTIMIZER, STATE
from dltrain.checkpoint.writer import patience_s
from dltrain.comm.process_group import ProcessGroup
from dltrain.models.deferred import deferred
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.rank_messages import MEMORY_ENV
from dltrain.protocol.reporter import RankReporter
from dltrain.train import frozen_base
from dltrain.train.frozen_base import frozen_base as base_of
from dltrain.train.progress import Progress
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import four_classes
from support.trainer.bodies.training.frozen_base import FROZEN, STEPS, STORED, network, newest, optimizer
from support.trainer.plans import make_plan
from support.trainer.ranks import ROOT


class StoppedError(Exception):
    """Ends a training in the middle."""


def started(folder: Path, steps: int, *, interval_s: float = 1e6, enabled: bool = True) -> Trainer:
    """Return the trainer of one rank, with checkpoints in ``folder``."""
    checkpoint = CheckpointRef(directory=str(folder), interval_s=interval_s, enabled=enabled)
    plan = make_plan(1, global_batch=12, steps=steps, model=ModelRef(command=("train.py",)), checkpoint=checkpoint)
    return Trainer(plan, ProcessGroup(), RankReporter(None), torch.device("cpu"), "cpu")


def trained(
    folder: Path,
    steps: int = STEPS,
    *,
    save: Any = "trained",
    net: nn.Module | None = None,
    stepped: Callable[[Trainer], object] = id,
    interval_s: float = 1e6,
    enabled: bool = True,
) -> nn.Module:
    """Train ``net`` on one rank, and return it. ``stepped`` is called after each update."""
    trainer = started(folder, steps, interval_s=interval_s, enabled=enabled)
    net = net if net is not None else network()
    model, opt = trainer.wrap(net, optimizer(net), save=save)
    for x, y in trainer.steps(trainer.loader(four_classes(77))):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        stepped(trainer)
    trainer.close()
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_checkpoint_has_trained_parameters_buffers_and_digests(tmp_path: Path) -> None:
    net = trained(tmp_path / "trained")
    folder, whole = newest(tmp_path / "trained"), network().state_dict()
    assert load_file(folder / MODEL).keys() == STORED
    digests = json.loads((folder / STATE).read_text())["frozen"]
    assert list(digests) == FROZEN
    assert digests == {name: hashlib.sha256(whole[name].numpy().tobytes()).hexdigest() for name in FROZEN}
    trained(tmp_path / "all", save="all")
    sizes = {name: (newest(tmp_path / name) / MODEL).stat().st_size for name in ("trained", "all")}
    frozen_nbytes = sum(whole[name].nbytes for name in FROZEN)
    assert sizes["all"] - sizes["trained"] > frozen_nbytes > 10 * sum(whole[name].nbytes for name in STORED) / 2
    assert (newest(tmp_path / "all") / OPTIMIZER).read_bytes() == (folder / OPTIMIZER).read_bytes()
    fresh = network(seed=7)
    fresh.load_state_dict({name: whole[name] for name in FROZEN}, strict=False)
    missing, unexpected = fresh.load_state_dict(load_file(folder / MODEL), strict=False)
    assert equal(fresh, net) and missing == FROZEN and not unexpected, "the file and the base are the model"


def test_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "halves", STEPS // 2)
    assert equal(trained(tmp_path / "halves"), whole)
    assert equal(trained(tmp_path / "all", save="all"), whole), "the training is that of whole checkpoints"


def test_converted_state_is_resumed(tmp_path: Path) -> None:
    """A model with hooks loads all of its tensors at once."""

    def hooked() -> nn.Module:
        net = network()
        net.register_state_dict_post_hook(lambda *_: None)
        return net

    whole = trained(tmp_path / "whole", net=hooked())
    trained(tmp_path / "halves", STEPS // 2, net=hooked())
    assert load_file(newest(tmp_path / "halves") / MODEL).keys() == STORED
    assert equal(trained(tmp_path / "halves", net=hooked()), whole)


def test_parameters_that_the_model_converts_are_saved() -> None:
    """A hook may put other values under the name of a frozen parameter, such as its sum with an adapter."""
    net = network()

    def merge(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state["2.base.weight"] = state["2.base.weight"] + state["2.up.weight"] @ state["2.down.weight"]

    net.register_state_dict_post_hook(merge)
    assert list(base_of(net, ProcessGroup()).digests) == [name for name in FROZEN if name != "2.base.weight"]


def test_copy_in_memory_has_no_frozen_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole")
    monkeypatch.setenv(MEMORY_ENV, str(tmp_path / "memory"))
    monkeypatch.setattr(memory_copy, "INTERVAL_S", 0.0)
    monkeypatch.setattr(memory_copy, "STALL_PART", 1e9)

    def stop(trainer: Trainer) -> None:
        if trainer.step == STEPS // 2:
            trainer.checkpoint_manager.wait()
            raise StoppedError

    with pytest.raises(StoppedError):
        trained(tmp_path / "volume", stepped=stop)
    (copy,) = (tmp_path / "memory").glob("step-*")
    assert load_file(copy / MODEL).keys() == STORED
    with pytest.raises(BadInputError, match=r"model: 0\.base\.weight: found values"):
        trained(tmp_path / "volume", net=network(seed=1))
    assert equal(trained(tmp_path / "volume"), whole)
    assert "in the memory of rank 0's pod" in capsys.readouterr().err


def other_values() -> nn.Module:
    net = network()
    with torch.no_grad():
        net.get_parameter("2.base.bias")[3] += 1e-6
        net.get_parameter("4.base.weight")[0, 0] += 1e-6
    return net


def one_more_is_trained() -> nn.Module:
    net = network()
    net.get_parameter("2.base.bias").requires_grad_(True)
    return net


def one_more_is_frozen() -> nn.Module:
    net = network()
    net.get_parameter("2.down.weight").requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "saves", "message"),
    [
        (
            other_values,
            ("trained", "trained"),
            r"model: 2\.base\.bias: found values with SHA-256 [0-9a-f]{12}… \(it is the first of 2 frozen parameters "
            r"that differ, of 6\); expected [0-9a-f]{12}…, as in the model .*Build the model from the same pretrained",
        ),
        (one_more_is_trained, ("trained", "trained"), r"model: 2\.base\.bias: found a trained parameter; expected a f"),
        (one_more_is_frozen, ("trained", "trained"), r"model: 2\.down\.weight: found a frozen parameter; expected a t"),
        (network, ("all", "trained"), r"t\.wrap: save: found 'trained'; expected 'all', .*Pass save='all', or use"),
        (network, ("trained", "all"), r"t\.wrap: save: found 'all'.*expected 'trained' and 6 frozen .*Pass save='tr"),
    ],
)
def test_other_base_is_refused(
    make: Callable[[], nn.Module], saves: tuple[str, str], message: str, tmp_path: Path
) -> None:
    trained(tmp_path, STEPS // 2, save=saves[0])
    before = {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")}
    with pytest.raises(BadInputError, match=f"^{message}"):
        trained(tmp_path, save=saves[1], net=make())
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")}, "the checkpoint is as before"
    trained(tmp_path, save=saves[0])


@pytest.mark.parametrize("how", ["unfrozen", "changed", "loaded"])
def test_changes_of_the_base_after_wrap_are_refused(how: str, tmp_path: Path) -> None:
    """Fixed at once: otherwise, a resumed run would continue with the base as it was in ``t.wrap``."""

    def change(trainer: Trainer) -> None:
        if trainer.step == 3 and how == "unfrozen":
            trainer.model.get_parameter("2.base.weight").requires_grad_(True)
        if trainer.step == 3 and how == "changed":
            with torch.no_grad():
                trainer.model.get_parameter("2.base.weight").mul_(1.0)
        if trainer.step == 3 and how == "loaded":
            trainer.model.load_state_dict(network().state_dict())

    first = "0" if how == "loaded" else "2"
    found = "a trainable parameter" if how == "unfrozen" else "a change of its values"
    with pytest.raises(MisuseError, match=rf"^model: {first}\.base\.weight: found {found} after t\.wrap; expected"):
        trained(tmp_path, stepped=change)
    assert not list(tmp_path.rglob(MODEL))
    trained(tmp_path, save="all", stepped=change if how != "unfrozen" else id)


def test_parameters_that_are_frozen_after_wrap_are_saved(tmp_path: Path) -> None:
    def freeze(trainer: Trainer) -> None:
        trainer.model.get_parameter("2.up.weight").requires_grad_(trainer.step > 4)

    net = trained(tmp_path, stepped=freeze)
    assert load_file(newest(tmp_path) / MODEL).keys() == STORED
    assert equal(trained(tmp_path), net), "the resumed training is complete"


def test_model_without_frozen_parameters_has_the_same_checkpoints(tmp_path: Path) -> None:
    for save in ("all", "trained"):
        trained(tmp_path / save, save=save, net=network().requires_grad_(True))
    folders = [newest(tmp_path / save) for save in ("all", "trained")]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    for found in files:
        found.pop("manifest.json")  # has the time
    assert files[0] == files[1] and "frozen" not in json.loads(files[0][STATE])
    trained(tmp_path / "all", 2 * STEPS, net=network().requires_grad_(True))


def test_each_parameter_is_hashed_once_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, content = [], frozen_base.content

    def counted(tensor: Tensor) -> Any:
        hashed.append(tensor)
        return content(tensor)

    monkeypatch.setattr(frozen_base, "content", counted)
    trained(tmp_path, interval_s=1e-9, stepped=lambda trainer: trainer.checkpoint_manager.wait())
    assert len(hashed) == len(FROZEN)
    assert len(list(tmp_path.rglob(MODEL))) > 1, "there were several checkpoints"
    trained(tmp_path / "none", enabled=False)
    trained(tmp_path / "all", save="all")
    assert len(hashed) == len(FROZEN)


def test_digests_cover_all_dtypes_layouts_and_names() -> None:
    """Tied weights have a digest under each name. Layout in memory is no part of the values."""
    net = nn.Module()
    net.low = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
    net.tied = nn.Parameter(torch.randn(4, 6).t(), requires_grad=False)
    net.again, net.number = net.tied, nn.Parameter(torch.tensor(3), requires_grad=False)
    net.none, net.trained = nn.Parameter(torch.empty(0, 3), requires_grad=False), nn.Parameter(torch.ones(2))
    digests = base_of(net, ProcessGroup()).digests
    assert list(digests) == ["low", "tied", "again", "number", "none"]
    expected = {
        "low": net.low.view(torch.uint8).numpy().tobytes(),
        "tied": net.tied.detach().contiguous().numpy().tobytes(),
        "number": net.number.numpy().tobytes(),
        "none": b"",
    }
    assert all(digests[name] == hashlib.sha256(content).hexdigest() for name, content in expected.items())
    assert digests["again"] == digests["tied"]


def test_digests_of_a_deferred_model_are_those_of_the_model_in_memory() -> None:
    def make() -> nn.Module:
        net = network(buffers=False)
        net.register_parameter("again", net.get_parameter("2.base.weight"))
        return net

    expected = base_of(make(), ProcessGroup()).digests
    torch.manual_seed(5)
    assert dict(base_of(deferred(make), ProcessGroup()).digests) == dict(expected) and len(expected) == 7


@pytest.mark.parametrize("save", ["frozen", None, True])
def test_other_values_of_save_are_refused(save: Any, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=rf"^t\.wrap: save: found {save!r}; expected 'all', or 'trained' to leave"):
        trained(tmp_path, save=save)


@pytest.mark.parametrize("save", ["all", "trained"])
def test_wait_for_a_checkpoint_covers_the_parameters_in_it(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: the time limit for the last checkpoint counted trained parameters only."""
    limits: dict[str, float] = {}
    monkeypatch.setattr(Progress, "busy", lambda self, what, limit_s: limits.update({what: limit_s}))
    trained(tmp_path, save=save)
    stored_nbytes = sum(tensor.nbytes for tensor in load_file(newest(tmp_path) / MODEL).values())
    trained_nbytes = sum(p.nbytes for p in network().parameters() if p.requires_grad)
    assert limits["checkpoint"] == pytest.approx(patience_s(stored_nbytes + 3 * trained_nbytes), rel=1e-7)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.up(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_code_of_the_page_trains_and_uses_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/how-to/frozen-and-several-models.md").read_text(encoding="utf-8")
    section = page.partition("## LoRA")[2].partition("\n## ")[0]
    training, use = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    save_file(Blocks().state_dict(), tmp_path / "base.safetensors")

    def adapted(steps: int, folder: Path) -> dict[str, Any]:
        names: dict[str, Any] = {"make_model": Blocks, "t": started(folder, steps)}
        torch.manual_seed(0)  # as dltrain.init
        exec(training.replace("/data/base/model.safetensors", str(tmp_path / "base.safetensors")), names)
        for x, y in names["t"].steps(names["t"].loader(four_classes(77))):
            names["opt"].zero_grad()
            cross_entropy(names["model"](x), y).backward()
            names["opt"].step()
        names["t"].close()
        return names

    whole = adapted(STEPS, tmp_path / "whole")["model"]
    adapted(STEPS // 2, tmp_path / "halves")
    names = adapted(STEPS, tmp_path / "halves")
    assert equal(names["model"], whole) and not equal(names["adapted"](), whole)
    newest(tmp_path / "halves").rename(tmp_path / "step-0000000300")
    assert load_file(tmp_path / "step-0000000300" / MODEL).keys() == {
        f"blocks.{block}.up.{name}.weight" for block in range(2) for name in ("down", "up")
    }
    monkeypatch.chdir(tmp_path)
    exec(use, names)
    one_file = torch.load("whole.pt")
    assert equal(names["model"], whole) and all(torch.equal(one_file[k], v) for k, v in whole.state_dict().items())
