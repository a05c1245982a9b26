"""Whether all ranks still hold the same parameters, to the bit: a 64-bit hash compared over ranks.

Ranks begin with equal parameters and apply equal gradients, so they stay equal, unless memory or a device errs, or a
program changes parameters on some ranks only. Nothing else would tell: each rank's loss goes on falling.

A parameter server applies no schedule of the script and keeps no parameters that anyone uses: it is left out.
Only ranks on the same kind of device are compared: unlike ones may round an update differently.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import ParametersDivergedError

_WORDS, _GPU_WORDS = 2**17, 2**20
"""Elements hashed at once: their products, 8 bytes each, stay in a core's cache. On a GPU larger blocks, for each is
three launches; hashes of unlike devices are not compared."""
_PRIME = 0x9E3779B97F4A7C15
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _odd(device: torch.device) -> Tensor:
    """A factor for each element of a block."""
    count, generator = _WORDS if device.type == "cpu" else _GPU_WORDS, torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).bitwise_or_(1).to(device)


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> int:
    """64-bit hash of the parameters' bits, in their order; computed where they are, at 0.9 GB/s of a core.

    Σ word_i * odd_i mod 2**64 over blocks, and a polynomial over the blocks' sums: one changed word always changes it.
    """
    sums: list[Tensor] = []
    for parameter in parameters:
        words = parameter.detach().contiguous().view(-1).view(_INTEGER[parameter.element_size()])
        odd = _odd(words.device)
        sums += [(block.long() * odd[: len(block)]).sum() for block in torch.split(words, len(odd))]
    value = 0
    for part in torch.stack(sums).tolist() if sums else ():
        value = (value * _PRIME + part + 1) % 2**64
    return value


def dissenters(values: Sequence[object], kinds: Sequence[str]) -> list[int]:
    """Ranks whose value is not that of most ranks of their kind; of a tie, the lowest rank's is taken for right."""
    right = {kind: Counter(v for v, k in zip(values, kinds, strict=True) if k == kind).most_common(1) for kind in kinds}
    return [rank for rank, kind in enumerate(kinds) if values[rank] != right[kind][0][0]]


def compare(world: ProcessGroup, parameters: Iterable[Tensor], kinds: Mapping[int, str], step: int) -> None:
    """Compare parameters over ``world`` after ``step`` steps; ``kinds``: the device of each of its ranks, by the number
    it goes by in the job.

    Raises ParametersDivergedError on every rank when they differ, PeerLostError when a rank is gone.
    """
    value = fingerprint(parameters)
    values = [tuple(row) for row in world.gather([value >> 32, value & 0xFFFFFFFF])]
    ranks = list(kinds)
    if wrong := [ranks[index] for index in dissenters(values, list(kinds.values()))]:
        others = ", ".join(str(rank) for rank in ranks if rank not in wrong)
        raise ParametersDivergedError(
            f"after step {step}, parameters of rank {', '.join(map(str, wrong))} are not those of rank {others}: "
            "memory or a device failed, or the program changes parameters on some ranks only"
        )
