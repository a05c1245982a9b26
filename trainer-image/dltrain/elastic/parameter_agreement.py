"""Compare the parameters of all ranks by a 64-bit hash, to detect silent data corruption.

Ranks start with equal parameters and apply equal gradients. So parameters stay equal to the bit, unless memory or a
device fails, or a script changes parameters on some ranks only. The loss does not show such a fault, because it keeps
falling.

Parameter servers are not compared: they do not run the script's schedules, and nobody uses their parameters. Only ranks
on the same kind of device are compared, because different devices may round an update differently.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import ParametersDivergedError

_WORDS, _GPU_WORDS = 2**17, 2**20
"""Elements per block of the hash. On a CPU, a block's 8-byte products fit into a core's cache. Blocks on a GPU are
larger, because each needs three kernel launches. Hashes of CPUs and GPUs are never compared."""
_PRIME = 0x9E3779B97F4A7C15
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _odd(device: torch.device) -> Tensor:
    """Return the fixed odd factors of the hash, as a tensor of 64-bit integers on ``device``.

    Their number is that of the elements per block. The i-th element of every hashed block is multiplied by the i-th
    factor.
    """
    count, generator = _WORDS if device.type == "cpu" else _GPU_WORDS, torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu").bitwise_or_(1).to(device)


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> int:
    """Return a 64-bit hash of the parameters' bits, in order, computed on their device (3.5 GB/s per CPU core).

    The hash of a block is Σ word_i * odd_i mod 2**64, where word_i is element i as an integer and odd_i a fixed odd
    factor. A polynomial combines the hashes of all blocks. Every change of a single element changes the hash.
    """
    tensors = [parameter.detach() for parameter in parameters]
    if not tensors:
        return 0
    odd = _odd(tensors[0].device)
    # All memory is allocated once. Results between large temporary tensors would divide the heap, so that it grows by
    # up to twice the parameters.
    products = torch.empty_like(odd)
    sums = odd.new_empty(sum(max(1, -(-tensor.numel() // len(odd))) for tensor in tensors))
    for block, total in zip(_blocks(tensors, len(odd)), torch.split(sums, 1), strict=True):
        product = products[: len(block)].copy_(block).mul_(odd[: len(block)])
        torch.sum(product, dim=0, keepdim=True, out=total)
    value = 0
    for part in sums.tolist():
        value = (value * _PRIME + part + 1) % 2**64
    return value


def _blocks(tensors: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Yield the elements of all tensors as integers, in blocks of at most ``length``. An empty tensor is one block."""
    for tensor in tensors:
        yield from torch.split(tensor.contiguous().view(-1).view(_INTEGER[tensor.element_size()]), length)


def dissenters(values: Sequence[object], kinds: Sequence[str]) -> list[int]:
    """Return the ranks whose parameters differ from those of most ranks on the same kind of device.

    ``values[i]`` and ``kinds[i]``: the hash of rank i's parameters, and the name of its device. The result contains
    indices into these lists. In a tie, the value of the lowest rank counts as right.
    """
    right = {kind: Counter(v for v, k in zip(values, kinds, strict=True) if k == kind).most_common(1) for kind in kinds}
    return [rank for rank, kind in enumerate(kinds) if values[rank] != right[kind][0][0]]


def compare(process_group: ProcessGroup, parameters: Iterable[Tensor], kinds: Mapping[int, str], step: int) -> None:
    """Check, after ``step`` steps, that the ranks of a process group on the same kind of device have equal parameters.

    ``kinds``: the name of each rank's device, by the rank's number in the plan. Raise ParametersDivergedError on every
    rank if parameters differ, and PeerLostError if a rank is lost.
    """
    value = fingerprint(parameters)
    values = [tuple(row) for row in process_group.gather([value >> 32, value & 0xFFFFFFFF])]
    ranks = list(kinds)
    if wrong := [ranks[index] for index in dissenters(values, list(kinds.values()))]:
        others = ", ".join(str(rank) for rank in ranks if rank not in wrong)
        raise ParametersDivergedError(
            f"after step {step}, parameters of rank {', '.join(map(str, wrong))} differ from those of rank {others}; "
            "expected equal ones. Memory or a device failed, or the script changes parameters on some ranks only, or "
            "not by the optimizer of t.wrap"
        )
