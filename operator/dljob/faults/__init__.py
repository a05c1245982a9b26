"""Nodes with repeated faults: which faults count, and how long a node is left out of new plans. No I/O, no clock."""

from dljob.faults.ledger import active, expired, forgiven, left_out_nodes, recorded
from dljob.faults.types import EVERY_NAMESPACE, Fault, FaultKind, FaultPolicy, Ledger, LeftOut, NodeRecord

__all__ = [
    "EVERY_NAMESPACE",
    "Fault",
    "FaultKind",
    "FaultPolicy",
    "Ledger",
    "LeftOut",
    "NodeRecord",
    "active",
    "expired",
    "forgiven",
    "left_out_nodes",
    "recorded",
]
