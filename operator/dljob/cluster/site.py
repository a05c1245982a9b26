"""Site: everything that an administrator states about the cluster and on which plans of all jobs depend."""

from dataclasses import dataclass

from dljob.cluster.domains import NO_BORDERS, SAME_AS_OTHERS, Spot, Topology
from dljob.cluster.energy import ASSUMED_ENERGY, EnergySettings
from dljob.cluster.prices import CATALOGUE_PRICES, Prices


@dataclass(frozen=True)
class Site:
    """Prices, energy, the network between zones and between racks, labels and interruptions of spot nodes, and data."""

    prices: Prices = CATALOGUE_PRICES
    energy: EnergySettings = ASSUMED_ENERGY
    topology: Topology = NO_BORDERS
    spot: Spot = SAME_AS_OTHERS
    data_source_Bps: float | None = None
    """Bandwidth of the server or object store from which nodes fetch data, for all of them together; None: unknown."""


ASSUMED_SITE = Site()
"""The site if the administrator has stated nothing."""
