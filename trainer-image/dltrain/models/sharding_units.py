"""The modules of a model whose parameters strategy Sharded gathers and reduces together."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

UNIT_NBYTES = 2**18
"""Minimum size in bytes of the parameters of a unit. Smaller modules belong to the unit of the whole model, because
each unit costs three messages per step."""
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units_of(model: nn.Module, min_nbytes: int) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, without the model itself, which has all others.

    These are the outermost elements of lists (ModuleList, Sequential, ModuleDict) with at least ``min_nbytes`` bytes of
    parameters, such as the layers of a transformer. A module that shares a parameter with a module outside of it (tied
    weights) is no unit, because two units cannot have the same parameter.
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))

    def is_unit(module: nn.Module) -> bool:
        within = Counter(id(p) for inner in module.modules() for p in inner.parameters(recurse=False))
        large = sum(p.nbytes for p in module.parameters()) >= min_nbytes
        return large and all(uses[key] == count for key, count in within.items())

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and is_unit(child):
                yield child
            else:
                yield from walk(child)

    return list(dict.fromkeys(walk(model)))


def largest_unit(model: nn.Module) -> int:
    """Return the number of parameters of the largest unit, with those that are not trained.

    It is that of all parameters if the model itself is the only unit.
    """
    inner = [sum(p.numel() for p in unit.parameters()) for unit in units_of(model, UNIT_NBYTES)]
    return max([sum(p.numel() for p in model.parameters()) - sum(inner), *inner])
