"""Translate between a measured link, its DLProfile and the types whose link is to be measured. No I/O."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from dlcontract.hardware import LinkRate
from dljob.api import DLProfileStatus
from dljob.api.profile import ProbedLink
from dljob.job.probes.changes import own_statuses


def unmeasured_links(profiles: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the device types whose hardware was measured, but since then no network between two of their nodes.

    ``profiles``: DLProfile objects. Only those that the operator itself writes count, and only valid ones.
    """
    found = set()
    for device, stored in own_statuses(profiles):
        try:
            status = DLProfileStatus.model_validate(stored, extra="ignore")
        except ValidationError:
            continue  # Edited by hand.
        if status.hardware is None or status.updated is None:
            continue
        link = status.hardware.network_link
        if link is None or link.measured is None or link.measured < status.updated:
            found.add(device)
    return found


def link_status(message: str, now: datetime) -> dict[str, Any]:
    """Return the part of a profile's status with the link that a probe has measured.

    ``message``: the probe's document. Raise ValueError if it is not one.
    """
    rate = LinkRate.model_validate_json(message)
    link = ProbedLink(latency_seconds=rate.latency_s, bandwidth_bytes_per_second=rate.Bps, measured=now)
    return {"hardware": {"networkLink": link.manifest()}}
