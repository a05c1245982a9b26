"""Translate between the probe's document, the hardware in DLProfile objects, and the planner's constants. No I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from dlcontract.hardware import HardwareMeasure
from dljob.api import API_VERSION, DLProfileStatus
from dljob.api.profiles.profile import (
    MAX_NOTE,
    HardwareFactors,
    HardwareProfile,
    ProbedLink,
    ProbedRanks,
    ProbedStep,
    RefittedRegression,
)
from dljob.calibrate.hardware import compared
from dljob.calibrate.structures import Refit, refitted
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device, TimeFactors
from dljob.cluster.hardware import KEY, Hardware, LinkSpeed
from dljob.job.identity import profile_name


def sheet_of(device: str, kind: str) -> Device:
    """Return the data sheet of a device type: of the GPU, or of one core. ``kind``: cpu or gpu."""
    return catalogue.gpu_or_assumed(device) if kind == "gpu" else catalogue.cpu(device, 1.0)


def hardware_profile(measure: HardwareMeasure, device: str, node: str = "") -> HardwareProfile:
    """Return the profile of a device type from the probe's document. ``node``: name of the measured node."""
    found = compared(measure, sheet_of(device, measure.kind))
    refit = refitted(measure, found.factors, found.near, found.memory_cores)

    def link(speed: LinkSpeed | None) -> ProbedLink | None:
        if speed is None:
            return None
        return ProbedLink(latency_seconds=speed.latency_s, bandwidth_bytes_per_second=speed.bandwidth_Bps)

    return HardwareProfile(
        kind=measure.kind,
        product=measure.device,
        node=node,
        cores=measure.cores,
        node_cores=measure.node_cores,
        kernel=measure.kernel,
        driver=measure.driver,
        torch=measure.torch,
        factors=HardwareFactors(**{name: _short(value) for name, value in asdict(found.factors).items()}),
        regression=None if refit is None else _regression(refit),
        deviation=_short(found.deviation),
        serial_fraction=None if found.serial is None else _short(found.serial),
        memory_cores=None if found.memory_cores is None else _short(found.memory_cores),
        memory_bytes_per_second=found.memory_Bps,
        disk_read_bytes_per_second=found.disk_Bps,
        disk_write_bytes_per_second=measure.disk.write_Bps if measure.disk else None,
        node_link=link(found.near),
        network_link=link(found.far),
        crowded=measure.crowded,
        background_cores=measure.background_cores,
        steps=tuple(
            ProbedStep(net=step.net, batch=step.batch, cores=step.cores, seconds=step.s, precision=step.precision)
            for step in measure.steps
        ),
        notes=tuple(note[:MAX_NOTE] for note in measure.notes),
    )


def _regression(refit: Refit) -> RefittedRegression:
    """Return the regression as profiles store it. Factors that do not improve the predictions are left out."""
    time, memory = refit.time_errors, refit.growth_errors
    return RefittedRegression(
        networks=refit.networks,
        time_factors={name: _short(value) for name, value in refit.time if time.improves},
        memory_factors={name: _short(value) for name, value in refit.growth if memory.improves},
        time_error=_short(time.refit),
        time_error_before=_short(min(time.probe, time.sheet)),
        memory_error=_short(memory.refit),
        memory_error_before=_short(memory.sheet),
        on_ranks=tuple(
            ProbedRanks(
                ranks=each.ranks,
                networks=each.networks,
                error=None if each.error is None else _short(each.error),
                watts=None if each.watts is None else _short(each.watts),
            )
            for each in refit.on_ranks
        ),
        fits_ranks=refit.fits_ranks,
    )


def with_stored_regression(
    profile: HardwareProfile, device: str, profiles: Iterable[Mapping[str, Any]]
) -> HardwareProfile:
    """Return ``profile`` with the regression of the stored profile of its device type, if it has none itself.

    A regression remains valid while processor, kernel, driver and PyTorch are those with which it was measured. If one
    of them differs, return ``profile`` unchanged. ``profiles``: DLProfile objects. A stored one that does not parse
    does not count.
    """
    earlier, _ = _stored(device, profiles)
    if profile.regression is not None or earlier is None or _software(earlier) != _software(profile):
        return profile
    return profile.model_copy(update={"regression": earlier.regression})


def with_stored_links(profile: HardwareProfile, device: str, profiles: Iterable[Mapping[str, Any]]) -> HardwareProfile:
    """Return ``profile`` with the links between nodes of the stored profile that were not measured together with it.

    Plans use them until the next measurement, which is due (``links.unmeasured_links``). A stored link without a time
    was measured together with the stored profile. ``profiles``: DLProfile objects. A stored one that does not parse
    does not count.
    """
    earlier, updated = _stored(device, profiles)
    if earlier is None:
        return profile
    far = profile.network_link
    if far is None and (kept := earlier.network_link) is not None:
        far = kept.model_copy(update={"measured": kept.measured or updated})
    return profile.model_copy(update={"network_link": far, "links_to": {**earlier.links_to, **profile.links_to}})


def _stored(device: str, profiles: Iterable[Mapping[str, Any]]) -> tuple[HardwareProfile | None, datetime]:
    """Return the stored hardware of a type and the time of its measurement, which is 1970 if it is unknown.

    The hardware is None if there is none, or if someone has made it invalid.
    """
    unknown = datetime.fromtimestamp(0, UTC)
    for stored in profiles:
        if stored["metadata"]["name"] == profile_name(KEY, device):
            try:
                status = DLProfileStatus.model_validate(stored.get("status") or {}, extra="ignore")
            except ValidationError:
                return None, unknown
            return status.hardware, status.updated or unknown
    return None, unknown


def _software(profile: HardwareProfile) -> tuple[str, ...]:
    return profile.product, profile.kernel, profile.driver, profile.torch


def hardware_body(profile: HardwareProfile, device: str, now: datetime) -> dict[str, Any]:
    """Return the DLProfile object with a device type's measured hardware, which plans of all namespaces use.

    A link between nodes without a time in ``profile`` was measured together with the rest.
    """
    if profile.network_link is not None and profile.network_link.measured is None:
        link = profile.network_link.model_copy(update={"measured": now})
        profile = profile.model_copy(update={"network_link": link})
    return {
        "apiVersion": API_VERSION,
        "kind": "DLProfile",
        "metadata": {"name": profile_name(KEY, device)},
        "spec": {"model": KEY, "device": device},
        "status": DLProfileStatus(hardware=profile, updated=now).manifest(),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def hardware_of(profile: HardwareProfile, device: str) -> Hardware:
    """Return the planner's constants of a hardware profile, bounded by the data sheet (``Hardware.believed``)."""

    def link(found: ProbedLink | None) -> LinkSpeed | None:
        return None if found is None else LinkSpeed(found.latency_seconds, found.bandwidth_bytes_per_second)

    sheet, regression = sheet_of(device, profile.kind), profile.regression
    return Hardware(
        factors=TimeFactors(**profile.factors.model_dump()),
        term_factors=tuple(regression.time_factors.items()) if regression else (),
        growth_factors=tuple(regression.memory_factors.items()) if regression else (),
        deviation=profile.deviation,
        serial=profile.serial_fraction,
        memory_cores=profile.memory_cores,
        memory_Bps=profile.memory_bytes_per_second,
        disk_Bps=profile.disk_read_bytes_per_second,
        disk_write_Bps=profile.disk_write_bytes_per_second,
        near=link(profile.node_link),
        far=link(profile.network_link),
        between=tuple(
            (to, LinkSpeed(each.latency_seconds, each.bandwidth_bytes_per_second))
            for to, each in sorted(profile.links_to.items())
        ),
        background_cpu=profile.background_cores or 0.0 if profile.kind == "cpu" else 0.0,
        node_cpu=float(profile.node_cores),
    ).believed(sheet.assumed, core=sheet if sheet.kind == "cpu" else None)
