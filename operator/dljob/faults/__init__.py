"""Decide which nodes with repeated faults are left out of new plans, and for how long.

The package does no I/O and reads no clock. Callers store the record of faults, and pass the current time.
"""

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
