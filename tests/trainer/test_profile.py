"""Tests of ``dltrain.profile`` against the layer tables of the performance model, and of its error messages."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.api import ModelSpec
from dljob.perf.step.model_split import cut_up
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin
from support.trainer.ranks import environment, run_apart

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dltrain.models import InputShape, build  # noqa: E402
from dltrain.models.pass_costs import Input  # noqa: E402
from dltrain.profile import load, main, profile  # noqa: E402


def test_profile_of_blocks_matches_the_tables() -> None:
    """Block inputs, what is kept outside of blocks, and what the largest block keeps."""
    data = DATASETS["synthetic-tokens"]
    with torch.device("meta"):
        model = build("gpt-mini", InputShape(data.shape, data.classes, True))
    found = profile(model, [Input(data.shape, torch.int64)], ["blocks"])
    elements = MODELS["gpt-mini"][0](data).checkpointed_elements
    assert elements is not None and found.checkpointed_nbytes == pytest.approx(4 * elements, rel=0.03)
    hints = ModelSpec.model_validate(yaml.safe_load(found.hints())["model"]).hints
    assert hints is not None and hints.checkpointed_activation_bytes_per_sample == round(found.checkpointed_nbytes)
    assert profile(model, [Input(data.shape, torch.int64)]).checkpointed_nbytes is None
    for path in ("nothing", "norm", "blocks.0.norm1"):
        with pytest.raises(ValueError, match="--blocks: found no modules"):
            profile(model, [Input(data.shape, torch.int64)], [path])


@pytest.mark.parametrize("name", ["gpt-mini", "mlp", "lenet"])
def test_pairs_of_built_in_models_match_their_tables(name: str) -> None:
    data = DATASETS[MODELS[name][1]]
    with torch.device("meta"):
        model = build(name, InputShape(data.shape, data.classes, data.tokens))
    before = {key: value.shape for key, value in model.named_parameters()}
    found = profile(model, [Input(data.shape, torch.int64 if data.tokens else torch.float32)])
    table = cut_up(builtin(name, None)).pairs
    assert found.pairs is not None and table is not None
    assert (found.pairs.count, found.pairs.units) == (len(table.summed_elements) + 1 >> 1, table.units)
    biases = sum(p.numel() for key, p in model.named_parameters() if key.endswith("bias"))
    assert table.parameters - biases <= found.pairs.parameters <= table.parameters, "the last bias is whole"
    assert found.pairs.FLOPs / (found.forward_FLOPs + found.backward_FLOPs) == pytest.approx(table.arithmetic, rel=0.06)
    assert found.pairs.reduced_nbytes == pytest.approx(4 * sum(table.summed_elements))
    assert 0 < found.pairs.activation_nbytes < found.activation_nbytes
    assert {key: value.shape for key, value in model.named_parameters()} == before, "the model is as it was"
    hints = ModelSpec.model_validate(yaml.safe_load(found.hints())["model"]).hints
    assert hints is not None and hints.pairs is not None and hints.pairs.parameters == found.pairs.parameters


class _Attention(nn.Module):
    """Attention whose forward pass names the number of heads, unless it is 0."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.given, self.out = heads, nn.Linear(8, 24), nn.Linear(8, 8)

    def pairs(self) -> list[Any]:
        return [(self.given, self.out, 2)]

    def forward(self, x: Any) -> Any:
        q, k, v = (each.unflatten(-1, (self.heads or -1, 4)).transpose(1, 2) for each in self.given(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_model_that_ranks_cannot_run_in_parts_has_no_pairs() -> None:
    assert profile(_Attention(heads=2), [Input((5, 8))]).pairs is None
    found = profile(_Attention(heads=0), [Input((5, 8))]).pairs
    assert found is not None and (found.units, found.parameters) == (2, 24 * 8 + 24 + 8 * 8)
    assert found.reduced_nbytes == 4 * 5 * 8, "the gradient of the data itself is not needed"
    wrong = nn.Sequential(nn.Linear(3, 3))
    wrong.pairs = lambda: [3]  # type: ignore[assignment]
    assert profile(wrong, [Input((3,))]).pairs is None


@pytest.mark.parametrize(
    ("model", "given", "output_nbytes"),
    [
        (nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 5)), Input((3,)), 4 * 5),
        (nn.Sequential(nn.Conv1d(3, 7, 1), nn.Flatten()), Input((3, 4)), None),
        (nn.GRU(3, 7), Input((4, 3)), None),
    ],
    ids=["linear", "convolution", "recurrent"],
)
def test_kind_of_layers_is_known(model: Any, given: Input, output_nbytes: int | None) -> None:
    """Kernels of convolutions and recurrent layers need memory for copies and gates."""
    found = profile(model, [given])
    assert found.dense_output_nbytes == output_nbytes
    hints = ModelSpec.model_validate(yaml.safe_load(found.hints())["model"]).hints
    assert hints is not None and hints.dense_output_bytes_per_sample == output_nbytes
    assert hints.largest_parameter_bytes == (None if output_nbytes is None else 4 * 7 * 5)
    assert hints.largest_activation_bytes_per_sample == (None if output_nbytes is None else 4 * 7)


@pytest.mark.parametrize("frozen", [False, True])
def test_largest_unit_is_a_layer_or_the_rest_of_the_model(frozen: bool) -> None:
    """Ranks with strategy Sharded gather the elements of a list one after another, and all other modules at once."""

    class Tower(nn.Module):
        def __init__(self, tokens: int) -> None:
            super().__init__()
            self.tokens = nn.Embedding(tokens, 256)
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))
            self.layers.requires_grad_(not frozen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)
            for layer in self.layers:
                x = layer(x)
            return x

    for tokens, expected in ((10, 256 * 256), (1000, 1000 * 256)):
        found = profile(Tower(tokens), [Input((3,), torch.int64)])
        hints = ModelSpec.model_validate(yaml.safe_load(found.hints())["model"]).hints
        assert hints is not None and hints.largest_unit_parameters == found.largest_unit == expected
    alone = profile(nn.Linear(3, 3), [Input((3,))])
    assert alone.largest_unit == 12 and "largestUnitParameters: 12\n" in alone.hints(), (
        "ranks gather all at once, and plans would assume a quarter"
    )


def test_only_parameters_that_are_trained_count_as_the_largest() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert profile(model, [Input((3,), torch.int64)]).largest_parameter_nbytes == 4 * 8 * 4


def test_memory_independent_of_the_batch_is_not_counted_per_sample() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(7, 5))

        def forward(self, x: Any) -> Any:
            return x @ (self.weight * self.weight)  # autograd stores the square once, for any batch size

    found = profile(Table(), [Input((7,))])
    assert (found.forward_FLOPs, found.activation_nbytes) == (2 * 7 * 5, 4 * 7)


def test_frozen_parameters_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    found = profile(model, [Input((8,))])
    assert found.parameters == 4 * 2 + 2
    assert found.frozen_nbytes == 4 * (8 * 4 + 4)
    assert found.forward_FLOPs == 2 * (8 * 4 + 4 * 2)
    assert found.backward_FLOPs == 2 * 4 * 2, "only the last weights have gradients"


class _Adapted(nn.Module):
    """A trained layer before a pair of which nothing, or only the first layer, is trained."""

    def __init__(self, *, trains_first: bool) -> None:
        super().__init__()
        self.before, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.up.requires_grad_(trains_first)
        self.down.requires_grad_(False)

    def pairs(self) -> list[Any]:
        return [(self.up, self.down)]

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.relu(self.up(self.before(x))))


@pytest.mark.parametrize("trains_first", [False, True])
def test_frozen_parameters_of_pairs_are_counted_apart(trains_first: bool) -> None:
    """The API rejects more parameters or operations in pairs than in the whole model."""
    found = profile(_Adapted(trains_first=trains_first), [Input((8,))])
    first, second = 8 * 32 + 32, 32 * 8
    assert found.frozen_nbytes == 4 * (second + 8 + (0 if trains_first else first))
    assert found.pairs is not None
    assert found.pairs.parameters == (first if trains_first else 0)
    assert found.pairs.frozen_nbytes == 4 * (second + (0 if trains_first else first))
    assert found.pairs.FLOPs == 2 * 8 * 32 * (5 if trains_first else 4), "frozen weights have no gradients"
    hints = ModelSpec.model_validate(yaml.safe_load(found.hints())["model"]).hints
    assert hints is not None and hints.pairs is not None
    assert (hints.frozen_bytes, hints.pairs.frozen_bytes) == (found.frozen_nbytes, found.pairs.frozen_nbytes)


def test_command_prints_hints(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def make_model():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),\n"
        "                         nn.Linear(8 * 16 * 16, 10))\n"
    )
    words = ("-m", "dltrain.profile", "mine:make_model", "--input", "3,16,16")
    done = run_apart(*words, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    hints = ModelSpec.model_validate(manifest["model"]).hints
    assert hints is not None
    assert hints.parameters == 3 * 8 * 9 + 8 + 16 + 8 * 256 * 10 + 10
    convolution, product = 2 * 3 * 8 * 9 * 256, 2 * 8 * 256 * 10
    assert hints.flops_per_sample == 2 * convolution + 3 * product
    assert hints.activation_bytes_per_sample == 4 * (3 * 256 + 2 * 8 * 256)  # stored by the convolution, norm and rest
    assert "sampleBytes: 3072" in done.stdout


REJECTED = {
    "no factory": ("torch", "3", "expected MODULE:NAME"),
    "no module": ("nowhere:model", "3", "nowhere:model: found an import error"),
    "no attribute": ("torch.nn:Nothing", "3", "torch.nn:Nothing: found an import error"),
    "no function": ("math:pi", "3", "found float; expected a function"),
    "no model": ("builtins:dict", "3", "found a result of type dict; expected a torch.nn.Module"),
    "arguments": ("torch.nn:Linear", "3", "torch.nn:Linear() fails on the meta device: TypeError"),
    "nothing to train": ("torch.nn:ReLU", "3", "no trainable parameter"),
    "shape": ("test_profile_models:small", "5", "found an error on inputs of shapes (batch, 5) of torch.float32"),
    "letters": ("test_profile_models:small", "a,b", "expected the shape of one sample"),
    "zero": ("test_profile_models:small", "0", "expected the shape of one sample"),
    "type": ("test_profile_models:small", "4:real", "expected one of PyTorch's"),
    "assertion": (
        "test_profile_models:Strict",
        "4",
        "found an error on inputs of shapes (batch, 4) of torch.float32: AssertionError",
    ),
    "values": ("test_profile_models:Choosy", "4", "needs tensor values"),
    "no gradient": ("test_profile_models:Detached", "4", "found no output with a gradient"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejection_says_how_to_fix_it(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import types

    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            return y if y.sum().item() > 0 else -y

    class Detached(Choosy):
        def forward(self, x: Any) -> Any:
            return self.layer(x).detach()

    class Strict(Choosy):
        def forward(self, x: Any) -> Any:
            raise AssertionError

    module: Any = types.ModuleType("test_profile_models")
    module.small, module.Choosy, module.Detached = (lambda: nn.Linear(4, 4)), Choosy, Detached
    module.Strict = Strict
    monkeypatch.setitem(sys.modules, "test_profile_models", module)
    name, shape, message = REJECTED[case]
    assert main([name, "--input", shape]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_model_instance_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    module: Any = types.ModuleType("ready")
    module.model = nn.Linear(4, 4)
    monkeypatch.setitem(sys.modules, "ready", module)
    assert load("ready:model") is module.model


def test_losses_of_two_models_add_up() -> None:
    """The losses of a GAN use the discriminator three times in a step, and once without the generator's gradient."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gen = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
            self.disc = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

        def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            fake = self.gen(noise)
            found: torch.Tensor = self.disc(real) + self.disc(fake.detach()) + self.disc(fake)
            return found

    found = profile(Losses(), [Input((64,)), Input((16,))])
    of_gen, of_disc = 16 * 128 + 128 * 64, 64 * 128 + 128
    assert found.parameters == of_gen + of_disc + 128 + 64 + 128 + 1
    assert found.forward_FLOPs == 2 * (of_gen + 3 * of_disc)
    without_inputs = 16 * 128 + 2 * 64 * 128  # noise, and the discriminator's inputs in two of its passes
    assert found.backward_FLOPs == 2 * found.forward_FLOPs - 2 * without_inputs
