"""Measure hardware, and links between nodes, while the operator runs (chart value ``probes``)."""

from dljob.controller.hardware_probes.probes import HardwareProbes

__all__ = ["HardwareProbes"]
