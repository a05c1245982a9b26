"""Names of the collectives: how gradients are summed over ranks."""

from typing import Literal, get_args

CollectiveName = Literal["Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling", "ParameterServer", "Torch"]
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)

MEASURABLE: tuple[CollectiveName, ...] = ("Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling")
"""Collectives in which every rank is a worker and MPI is all they share: ranks may choose among them by themselves."""
