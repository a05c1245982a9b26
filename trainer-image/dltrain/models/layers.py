"""Ways to split a model: a sequence of layers (pipeline stages), or pairs of linear layers (tensor parallelism).

For a ``Sequential``, dltrain finds the layers and pairs itself. Other models need the methods ``layers`` and ``pairs``,
or functions that take the model (``set_cuts``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dltrain.protocol.errors import MisuseError

_CUTS = "_dltrain_cuts"
"""Attribute of a model with the functions of ``set_cuts``."""

Describe = Callable[[Any], Sequence[Any]]
"""Function that takes a model and returns its layers or its pairs, as the methods ``layers`` and ``pairs`` do."""


@dataclass(frozen=True)
class Layer:
    """One layer of a sequence. Its input is the previous layer's output. Layers may share parameters (tied weights).

    ``run``: the layer's forward pass. ``parameters``: the model's parameters that it uses. ``name``: its name for
    messages.
    """

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    name: str = ""


@dataclass(frozen=True)
class Pair:
    """Two linear layers of a model, between which the hidden *units* are independent, so that ranks can split them.

    A unit is a hidden feature of an MLP or an attention head. The layer ``first`` computes ``blocks`` vectors per unit
    (3 for a head: query, key and value), and the layer ``second`` reads one vector per unit.
    """

    first: str
    second: str
    """Names of the two modules in the model."""
    units: int
    blocks: int = 1
    others: tuple[str, ...] = ()
    """Names of modules that are split like ``first``, if a vector per unit is computed by a layer of its own."""

    @property
    def firsts(self) -> tuple[str, ...]:
        return (self.first, *self.others)


def set_cuts(model: nn.Module, layers: Describe | None, pairs: Describe | None) -> None:
    """Store functions that describe how ``model`` is cut. They take precedence over methods of the model."""
    setattr(model, _CUTS, (layers, pairs))


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's sequence of layers.

    Raise MisuseError if the model does not say what its layers are, or if they are not layers of the model.
    """
    if (given := _described(model, "layers")) is None:
        if not _is_plain_sequence(model):
            raise MisuseError(
                f"t.create: model: found a {type(model).__name__} with parallelism.strategy Pipeline; expected an "
                "nn.Sequential, or a model that says what its layers are. Add a method layers() that returns the list "
                "of its modules in the order in which they run, or pass such a function: t.create(make, layers=…)"
            )
        given = list(model.children())
    layers = [_layer(model, index, each) for index, each in enumerate(given)]
    used = {parameter for layer in layers for parameter in layer.parameters}
    if unused := [name for name, parameter in model.named_parameters() if parameter not in used]:
        raise MisuseError(
            f"layers: found no layer with the parameters {', '.join(unused)}; expected each parameter of the model in "
            "at least one layer. Add the layer, or a tuple (function, modules and parameters that it uses)"
        )
    return layers


def pairs_of(model: nn.Module) -> list[Pair]:
    """Return the pairs of linear layers that tensor parallelism splits. No layer is in two pairs.

    In a ``Sequential``, a pair consists of two linear layers with a ReLU between them. Other models return their pairs
    from a method ``pairs``; without it, they have none. Raise MisuseError for pairs that cannot be split.
    """
    if (given := _described(model, "pairs")) is not None:
        found = [each if isinstance(each, Pair) else _pair(model, each) for each in given]
        names = [name for pair in found for name in (*pair.firsts, pair.second)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise MisuseError(f"pairs: found {twice[0]} twice; expected each linear layer in at most one pair")
        return found
    return _pairs_of_sequence(list(model.named_children()) if _is_plain_sequence(model) else [])


def _pairs_of_sequence(row: list[tuple[str, nn.Module]]) -> list[Pair]:
    found: list[Pair] = []
    at = 0
    while at + 2 < len(row):
        (name, first), (_, between), (other, second) = row[at : at + 3]
        if isinstance(first, nn.Linear) and isinstance(between, nn.ReLU) and isinstance(second, nn.Linear):
            found.append(Pair(name, other, units=first.out_features))
            at += 2
        at += 1
    return found


def _is_plain_sequence(model: nn.Module) -> bool:
    """Return True for a ``Sequential`` whose forward pass is that of torch."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _described(model: nn.Module, what: str) -> list[Any] | None:
    """Return what the model says about its ``what``, "layers" or "pairs", or None if it says nothing."""
    layers, pairs = getattr(model, _CUTS, (None, None))
    if (describe := layers if what == "layers" else pairs) is not None:
        found = describe(model)
    elif callable(getattr(type(model), what, None)):
        found = getattr(model, what)()
    else:
        return None
    if not isinstance(found, list | tuple | nn.ModuleList) or not len(found):
        raise MisuseError(f"{what}: found {found!r}; expected a list with at least one entry")
    return list(found)


def _layer(model: nn.Module, index: int, given: Any) -> Layer:
    """Return an entry of ``layers`` as a layer: a module, or (function, modules and parameters that it uses)."""
    if isinstance(given, Layer):
        return given
    where = f"layers: entry {index}"
    if isinstance(given, nn.Module):
        run, uses, name = given, (given,), type(given).__name__
    elif isinstance(given, tuple) and given and callable(given[0]) and not isinstance(given[0], nn.Module):
        run, uses, name = given[0], given[1:], getattr(given[0], "__name__", type(given[0]).__name__)
    else:
        raise MisuseError(
            f"{where}: found {type(given).__name__}; expected a module, or a tuple of a function and of the modules "
            "and parameters that it uses"
        )
    parameters: dict[Tensor, None] = {}
    for each in uses:
        if each is model:
            raise MisuseError(f"{where}: found the whole model; expected one of its modules")
        if not isinstance(each, nn.Module | nn.Parameter):
            raise MisuseError(f"{where}: found {type(each).__name__} after {name}; expected a module or a parameter")
        parameters |= dict.fromkeys(each.parameters() if isinstance(each, nn.Module) else [each])
    known = set(model.parameters())
    if any(parameter not in known for parameter in parameters):
        raise MisuseError(f"{where}: found {name} with parameters that the model does not have; expected its modules")
    return Layer(run, tuple(parameters), f"{index} ({name})")


def _pair(model: nn.Module, given: Any) -> Pair:
    """Return an entry of ``pairs`` as a pair: (first, second) or (first, second, heads).

    ``first`` is a linear layer, or a tuple of linear layers that all feed ``second``, such as query, key and value.
    """
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise MisuseError(
            f"pairs: found {type(given).__name__}; expected tuples (first, second) of two linear layers, or (first, "
            "second, heads) for attention, where first may be a tuple of linear layers, such as query, key and value"
        )
    first, second, *heads = given
    firsts = list(first) if isinstance(first, tuple | list) else [first]
    names = {id(module): name for name, module in model.named_modules()}
    for layer in (*firsts, second):
        if not isinstance(layer, nn.Linear) or id(layer) not in names:
            raise MisuseError(f"pairs: found {type(layer).__name__}; expected linear layers (nn.Linear) of the model")
    width = second.in_features
    units = heads[0] if heads else width
    if not isinstance(units, int) or units < 1 or width % units:
        raise MisuseError(f"pairs: found {units} heads with {width} inputs of the second layer; expected a divisor")
    if any(layer.out_features % width for layer in firsts) or len({layer.out_features for layer in firsts}) > 1:
        sizes = ", ".join(str(layer.out_features) for layer in firsts)
        raise MisuseError(
            f"pairs: found {sizes} outputs of the first layer and {width} inputs of the second; expected equal "
            "numbers, or a multiple for a layer that computes query, key and value together"
        )
    blocks = firsts[0].out_features // width
    others = tuple(names[id(layer)] for layer in firsts[1:])
    return Pair(names[id(firsts[0])], names[id(second)], units, blocks, others)
