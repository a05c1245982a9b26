"""Translate between a measured link, its DLProfile and the links that are to be measured. No I/O."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from dlcontract.hardware import LinkRate
from dljob.api import DLProfileStatus
from dljob.api.profiles.profile import MAX_LINKS, HardwareProfile, ProbedLink
from dljob.job.probes.changes import own_statuses
from dljob.planner.candidates.pools import kind_of

Ends = tuple[str, str]
"""Device types of the two nodes of a link, in alphabetical order. They are equal for a link within a type."""


def unmeasured_links(profiles: Iterable[Mapping[str, Any]]) -> set[Ends]:
    """Return the ends of the links between nodes that were not measured since the hardware of both types was measured.

    These are links between nodes of one type, and between nodes of two types that a plan may use together: of one kind
    (CPUs, or GPUs of a vendor). ``profiles``: DLProfile objects. Only those that the operator itself writes count, and
    only valid ones.
    """
    found, measured = set(), dict[str, tuple[HardwareProfile, datetime]]()
    for device, stored in own_statuses(profiles):
        try:
            status = DLProfileStatus.model_validate(stored, extra="ignore")
        except ValidationError:
            continue  # Edited by hand.
        if status.hardware is not None and status.updated is not None:
            measured[device] = status.hardware, status.updated
    for device, (hardware, updated) in measured.items():
        if _is_due(hardware.network_link, updated):
            found.add((device, device))
    for (device, (hardware, updated)), (other, (beside, later)) in combinations(sorted(measured.items()), 2):
        full = len(hardware.links_to) >= MAX_LINKS and other not in hardware.links_to
        if full or kind_of(device, hardware.kind == "gpu") != kind_of(other, beside.kind == "gpu"):
            continue
        if _is_due(hardware.links_to.get(other), max(updated, later)):
            found.add((device, other))
    return found


def links_to_measure(
    profiles: Iterable[Mapping[str, Any]], devices: Iterable[str], nodes: Mapping[str, int]
) -> list[Ends]:
    """Return the ends of the links that ``dljob probe --link`` measures after the hardware of types: those unmeasured.

    Links within a type come first, because most plans use one type. ``profiles``: DLProfile objects. ``devices``: only
    links with an end of these types; empty: all. ``nodes``: number of nodes by type. Links without two nodes are left
    out.
    """
    wanted = set(devices)
    return sorted(
        (
            ends
            for ends in unmeasured_links(profiles)
            if (not wanted or wanted & {*ends}) and all(nodes.get(end, 0) > (ends[0] == ends[1]) for end in ends)
        ),
        key=lambda ends: (ends[0] != ends[1], ends),
    )


def _is_due(link: ProbedLink | None, since: datetime) -> bool:
    return link is None or link.measured is None or link.measured < since


def probed_link(message: str, now: datetime) -> ProbedLink:
    """Return the link that a probe has measured. ``message``: its document. Raise ValueError if it is not one."""
    rate = LinkRate.model_validate_json(message)
    return ProbedLink(latency_seconds=rate.latency_s, bandwidth_bytes_per_second=rate.Bps, measured=now)


def link_status(link: ProbedLink, other: str = "") -> dict[str, Any]:
    """Return the part of a profile's status with a measured link.

    ``other``: device type of the other node; empty: the profile's own.
    """
    return {"hardware": {"linksTo": {other: link.manifest()}} if other else {"networkLink": link.manifest()}}
