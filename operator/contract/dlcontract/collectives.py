"""Names of the collectives, the algorithms that reduce gradients over ranks."""

from typing import Literal, get_args

CollectiveName = Literal["Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling", "ParameterServer", "Torch"]
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)

MEASURABLE: tuple[CollectiveName, ...] = ("Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling")
"""Collectives that need only MPI and no parameter server. Ranks may measure the times of these and use the fastest."""
