"""Names of the collectives, the algorithms that reduce gradients over ranks."""

from typing import Literal, get_args

CollectiveName = Literal[
    "Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling", "ParameterServer", "LayeredServer", "Torch", "DDP"
]
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)

MEASURABLE: tuple[CollectiveName, ...] = ("Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling")
"""Collectives that need only MPI and no parameter server. Ranks may measure the times of these and use the fastest."""

SERVERS: tuple[CollectiveName, ...] = ("ParameterServer", "LayeredServer")
"""Collectives with ranks that do not train. With ``ParameterServer``, servers are the last ranks: they sum gradients,
and every worker updates its copy of the parameters. With ``LayeredServer``, rank 0 owns the parameters: it receives the
gradients of one parameter tensor after another, updates the parameters, and broadcasts all of them."""

DDP_BUCKET_NBYTES = 25 * 2**20
"""Size in bytes of a bucket of gradients with the collective DDP: the default of PyTorch's DistributedDataParallel."""
