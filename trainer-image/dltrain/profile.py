"""Count the operations and memory of a PyTorch model: ``python -m dltrain.profile MODULE:NAME --input SHAPE``.

The command prints ``spec.model.hints`` for a custom model. It builds the model and runs one forward and backward pass
on PyTorch's meta device, where tensors have shapes but no values. GPT-2 XL takes seconds and no memory. Nothing is
trained.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from torch import nn

from dltrain.models.pair_costs import PairsProfile, pairs_profile
from dltrain.models.pass_costs import BATCHES, Input, run_pass
from dltrain.models.sharding_units import largest_unit


@dataclass(frozen=True)
class Profile:
    """Operations and memory that a model needs for one sample, and its number of trainable ``parameters``.

    A multiply-add counts as two operations (FLOPs). ``sample_nbytes``: size of one sample in bytes.
    """

    parameters: int
    forward_FLOPs: float
    backward_FLOPs: float
    activation_nbytes: float
    """Bytes that the forward pass saves for the backward pass, including the sample itself. A storage that several
    tensors share counts once."""
    sample_nbytes: int
    checkpointed_nbytes: float | None = None
    """``activation_nbytes`` with activation checkpointing of the given blocks; None without blocks."""
    dense_output_nbytes: float | None = None
    """Bytes of the output; None if the model has convolutions or recurrent layers, whose kernels need more memory."""
    largest_parameter_nbytes: int = 0
    """Bytes of the largest trainable tensor."""
    largest_activation_nbytes: float = 0.0
    """Bytes of the largest tensor in ``activation_nbytes``."""
    frozen_nbytes: int = 0
    """Bytes of the parameters that are not trained."""
    largest_unit: int = 0
    """Parameters of the largest module that ranks gather with strategy Sharded; all of them for a model without layers
    in a list. 0: unknown."""
    pairs: PairsProfile | None = None
    """None if the model says nothing about pairs, or has a pair that cannot be split."""

    def hints(self) -> str:
        """Return the profile as YAML for ``spec.model.hints``, with which the operator plans a custom model."""
        return (
            f"model:\n  hints:\n    parameters: {self.parameters}\n"
            f"    flopsPerSample: {self.forward_FLOPs + self.backward_FLOPs:.0f}"
            f"  # forward {self.forward_FLOPs:.4g}, backward {self.backward_FLOPs:.4g}\n"
            f"    activationBytesPerSample: {self.activation_nbytes:.0f}\n{self._checkpointed()}{self._frozen()}"
            f"{self._dense()}{self._unit()}{self._pairs()}"
            f"# dataset.sampleBytes: {self.sample_nbytes} if samples are stored like the model's input\n"
        )

    def _checkpointed(self) -> str:
        if self.checkpointed_nbytes is None:
            return ""
        return f"    checkpointedActivationBytesPerSample: {self.checkpointed_nbytes:.0f}\n"

    def _frozen(self) -> str:
        return (
            f"    frozenBytes: {self.frozen_nbytes}  # parameters that are not trained\n" if self.frozen_nbytes else ""
        )

    def _dense(self) -> str:
        if self.dense_output_nbytes is None:
            return ""
        return (
            f"    denseOutputBytesPerSample: {self.dense_output_nbytes:.0f}  # for a model without convolutions\n"
            f"    largestActivationBytesPerSample: {self.largest_activation_nbytes:.0f}\n"
            f"    largestParameterBytes: {self.largest_parameter_nbytes}\n"
        )

    def _unit(self) -> str:
        return f"    largestUnitParameters: {self.largest_unit}\n" if self.largest_unit else ""

    def _pairs(self) -> str:
        if (pairs := self.pairs) is None:
            return ""
        return (
            f"    pairs:  # for strategy Tensor\n      count: {pairs.count}\n      units: {pairs.units}\n"
            f"      parameters: {pairs.parameters}\n      flopsPerSample: {pairs.FLOPs:.0f}\n"
            f"      activationBytesPerSample: {pairs.activation_nbytes:.0f}\n"
            f"      reducedBytesPerSample: {pairs.reduced_nbytes:.0f}\n"
            + (f"      frozenBytes: {pairs.frozen_nbytes}\n" if pairs.frozen_nbytes else "")
        )


def blocks_at(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the blocks at ``path`` of the model, such as ``encoder.layers``: the modules of a list or Sequential.

    Raise ValueError if there are none.
    """
    try:
        found = list(model.get_submodule(path).children())
    except AttributeError:
        found = []
    if not found:
        raise ValueError(
            f"--blocks: found no modules at {path!r} of the model; expected the path of a ModuleList or Sequential, "
            "such as encoder.layers. Name the modules that the script passes to t.checkpoint_activations"
        )
    return found


def profile(model: nn.Module, inputs: Sequence[Input], blocks: Sequence[str] = ()) -> Profile:
    """Return the operations and memory per sample of ``model`` in training mode. The model moves to the meta device.

    ``inputs``: shapes of the model's arguments. FLOPs are those of matrix products, convolutions and attention; a
    multiply-add counts as two. ``blocks``: paths of lists of modules for which to count activation checkpointing
    (``blocks_at``). Raise ValueError if the model fails on such inputs, returns no tensor with a gradient, has no
    trainable parameter or no such blocks, or computes something that depends on tensor values.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters = sum(p.numel() for p in trained)
    if not parameters:
        raise ValueError("model: found no trainable parameter; expected at least one to train")
    model = model.to("meta").train()
    wrapped = [block for path in blocks for block in blocks_at(model, path)]
    try:
        with torch.device("meta"):  # for tensors that forward() creates
            low, high = (run_pass(model, inputs, batch, wrapped) for batch in BATCHES)
            convolving, output, forward, backward, largest, saved, outside, *within = (
                (b - a) / (BATCHES[1] - BATCHES[0]) for a, b in zip(low, high, strict=True)
            )
            pairs = pairs_profile(model, inputs, forward + backward, saved)
    except (RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
            raise ValueError(
                f"model: found code that needs tensor values, which the meta device does not have ({_line(error)}). "
                "Remove this code from forward(), or write spec.model.hints by hand: parameters, and 6 x parameters "
                "as flopsPerSample"
            ) from error
        shapes = ", ".join(f"(batch, {', '.join(map(str, i.shape))}) of {i.dtype}" for i in inputs)
        raise ValueError(
            f"model: found an error on inputs of shapes {shapes}: {_line(error)}. Give --input with the right shape "
            "for each input of the model"
        ) from error
    is_dense = not convolving and not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    return Profile(
        parameters,
        forward,
        backward,
        saved,
        sum(i.nbytes for i in inputs),
        outside + max(within) if within else None,
        output if is_dense else None,
        max(p.nbytes for p in trained),
        largest,
        sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        largest_unit(model),
        pairs,
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def load(name: str) -> nn.Module:
    """Return the model that ``name`` refers to: a function without arguments that returns it, or the model itself.

    ``name``: ``MODULE:FUNCTION`` or ``MODULE:MODEL``. Raise ValueError if there is no such object or it creates no
    model.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(
            f"found {name!r}; expected MODULE:NAME, such as train:make_model. "
            "NAME is a model, or a function that returns one"
        )
    try:
        factory = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: found an import error: {_line(error)}; expected a function in a module. Run this where `import "
            f"{module}` works"
        ) from error
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ValueError(f"{name}: found {type(factory).__name__}; expected a function without arguments, or a model")  # noqa: TRY004
    with torch.device("meta"):
        try:
            model = factory()
        except Exception as error:
            raise ValueError(
                f"{name}() fails on the meta device: {type(error).__name__}: {_line(error)}. Name a function that "
                "needs no arguments and no tensor values"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(  # noqa: TRY004 - input of a user
            f"{name}(): found a result of type {type(model).__name__}; expected a torch.nn.Module. Return the model"
        )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.profile",
        description="Print spec.model.hints for a PyTorch model: parameters, FLOPs and activation bytes of one "
        "sample, counted on the meta device, without data, GPU or training.",
        epilog="Example: python -m dltrain.profile train:make_model --input 3,224,224",
    )
    parser.add_argument("model", metavar="MODULE:NAME", help="a model, or a function that returns one")
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        action="append",
        required=True,
        help="shape of one sample, such as 3,224,224 or 512:int64 (default float32); once for each input of forward()",
    )
    parser.add_argument(
        "--blocks",
        metavar="PATH",
        action="append",
        default=[],
        help="modules that the script passes to t.checkpoint_activations, such as encoder.layers for the modules in "
        "model.encoder.layers; also prints the activation bytes with activation checkpointing",
    )
    given = parser.parse_args(arguments)
    try:
        inputs = [Input.parse(text) for text in given.input]
        sys.stdout.write(profile(load(given.model), inputs, given.blocks).hints())
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
