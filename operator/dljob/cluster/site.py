"""Site: everything that an administrator states about the cluster and on which plans of all jobs depend."""

from dataclasses import dataclass

from dljob.cluster.domains import NO_BORDERS, SAME_AS_OTHERS, Spot, Topology
from dljob.cluster.energy import ASSUMED_ENERGY, EnergySettings
from dljob.cluster.prices import CATALOGUE_PRICES, Prices


@dataclass(frozen=True)
class Site:
    """Prices, energy, the network between zones and between racks, and labels and interruptions of spot nodes."""

    prices: Prices = CATALOGUE_PRICES
    energy: EnergySettings = ASSUMED_ENERGY
    topology: Topology = NO_BORDERS
    spot: Spot = SAME_AS_OTHERS


ASSUMED_SITE = Site()
"""The site if the administrator has stated nothing."""
