"""Usage of a job so far, in its status: devices, energy, money and carbon.

The status has the usage until some time, and the rate from then on. Each reconcile that changes the status adds the
time that has passed since then, at that rate. The sum therefore survives restarts of the operator, in which pods run
on. Where counters measure the energy of devices, their sum is in the job's reports, and the rate contains only the
rest.
"""

from datetime import UTC, datetime

from dlcontract import MeasuredEnergy, Report, RunPhase
from dljob.api import DLJobStatus, EnergySource, Minimize, Usage, UsageRate
from dljob.cluster import catalogue
from dljob.cluster.site import Site
from dljob.job.defaults import site_of
from dljob.job.plan.pod_groups import PodGroup
from dljob.job.plan.stored import StoredPlan
from dljob.perf.resources import energy, power
from dljob.reconcile.parsed import ParsedJob

NOTHING = UsageRate()


def with_usage(parsed: ParsedJob, status: DLJobStatus, accepted: StoredPlan | None, now: datetime) -> DLJobStatus:
    """Return ``status``, the new status of a job, with the field ``usage`` up to date.

    The field changes only together with the rate or with another field, because each write of a status is a request to
    the API server. ``accepted``: the plan of the job's pods; None: it has none.
    """
    before, site, now = parsed.before.usage, site_of(parsed.defaults), now.astimezone(UTC).replace(microsecond=0)
    rate = _rate(parsed, accepted, site)
    if before is None:
        if rate == NOTHING:
            return status
        carbon_g = 0.0 if _counts_carbon(parsed, site) else None
        return status.model_copy(update={"usage": Usage(time=now, rate=rate, carbon_grams=carbon_g)})
    idle = rate == before.rate == NOTHING and _more_J(before, parsed.report) == 0
    if idle or (rate == before.rate and status == parsed.before):
        return status
    return status.model_copy(update={"usage": _advanced(before, rate, parsed.report, site, now)})


def _advanced(old: Usage, rate: UsageRate, report: Report | None, site: Site, now: datetime) -> Usage:
    """Return ``old`` with the use until ``now`` (in whole seconds) added, and with the new rate."""
    now = max(now, old.time)  # A clock may be set back.
    seconds = (now - old.time).total_seconds()
    modelled_J = old.rate.watts * seconds
    measured_J = _more_J(old, report) * _overhead(site)
    begin = old.time.astimezone(UTC)
    begin_s = 3600.0 * begin.hour + 60.0 * begin.minute + begin.second
    carbon_g = site.energy.carbon.grams(modelled_J + measured_J, begin_s, seconds)
    usd = site.prices.with_energy_usd(old.rate.cost_per_hour * seconds / 3600, measured_J)
    counters = report.energy if report is not None else None
    return Usage(
        time=now,
        rate=rate,
        device_seconds=round(old.device_seconds + old.rate.devices * seconds, 3),
        energy_joules=round(old.energy_joules + modelled_J + measured_J, 1),
        energy_source=_source(old, counters),
        counted_joules=old.counted_joules if counters is None else counters.joules,
        cost=round(old.cost + usd, 6),
        carbon_grams=None if old.carbon_grams is None else round(old.carbon_grams + carbon_g, 3),
    )


def _more_J(old: Usage, report: Report | None) -> float:  # noqa: N802 - the unit is part of the name
    """Return the joules that counters have measured since ``old``. A sum that has become smaller began again at 0."""
    if report is None or report.energy is None:
        return 0.0
    new_J = report.energy.joules
    return new_J - old.counted_joules if new_J >= old.counted_joules else new_J


def _source(old: Usage, counters: MeasuredEnergy | None) -> EnergySource:
    """Return the source of the energy so far. ``counters``: what the last report says; None: no counter is readable.

    The start of the pods, before any counter is read, does not count.
    """
    if counters is None:
        return EnergySource.MODELLED if old.counted_joules == 0 else EnergySource.MIXED
    if counters.part < 1:
        return EnergySource.MIXED
    return EnergySource.MIXED if old.energy_source is EnergySource.MIXED else EnergySource.MEASURED


def _rate(parsed: ParsedJob, accepted: StoredPlan | None, site: Site) -> UsageRate:
    """Return what the job's pods use now: the part of the plan's devices, power and price that its bound pods have."""
    held = sum(pod.node is not None for pod in parsed.observed.pods)
    if accepted is None or not held:
        return NOTHING
    predicted, share = accepted.status.predicted, min(1.0, held / accepted.nodes)
    devices = [(group, _device(group, site)) for group in accepted.groups]
    ranks = {group.name: group.nodes * (group.ranks_per_node if group.is_gpu else 1) for group, _ in devices}
    watts = sum(energy.rank_watts(device, 1.0) * ranks[group.name] for group, device in devices)
    usd_per_s = sum(energy.cost_usd(device, 1.0, ranks[group.name]) for group, device in devices)
    if site.spot.includes_all(accepted.node_domain):
        usd_per_s *= site.spot.price_factor
    usd_per_s = site.prices.with_energy_usd(usd_per_s, watts)
    if predicted.total_seconds > 0 and predicted.energy_joules is not None and predicted.cost is not None:
        watts, usd_per_s = predicted.energy_joules / predicted.total_seconds, predicted.cost / predicted.total_seconds
    hosts_W = sum(energy.overhead(d) * energy.host_watts(d) * ranks[group.name] for group, d in devices)
    report = parsed.report
    counted = report is not None and report.phase is RunPhase.RUNNING and report.plan_number == accepted.plan.number
    part = report.energy.part if counted and report is not None and report.energy is not None else 0.0
    rest_W = (1 - part) * watts + part * min(watts, hosts_W)
    usd_per_s = max(
        0.0, usd_per_s - site.prices.with_energy_usd(0.0, watts - rest_W)
    )  # ``_advanced`` adds what counts.
    return UsageRate(
        devices=round(share * sum(_count(group) for group, _ in devices), 3),
        watts=round(share * rest_W, 2),
        cost_per_hour=round(share * usd_per_s * 3600, 6),
    )


def _count(group: PodGroup) -> float:
    """Return the number of GPUs or CPUs of a group: the CPUs that its pods request."""
    return group.nodes * (group.ranks_per_node if group.is_gpu else group.cpu_m / 1000)


def _device(group: PodGroup, site: Site) -> catalogue.Device:
    """Return one GPU of a group or, on CPUs, the CPUs that one of its pods requests together as one device."""
    cores = 1.0 if group.is_gpu else group.cpu_m / 1000
    found = catalogue.gpu_or_assumed(group.device) if group.is_gpu else catalogue.cpu(group.device, cores)
    return power.limited(site.energy.device(site.prices.device(found, group.device, cores), group.device, cores))


def _overhead(site: Site) -> float:
    """Return the data centre's overhead, by which the energy of counters is multiplied."""
    return energy.PUE if site.energy.pue is None else site.energy.pue


def _counts_carbon(parsed: ParsedJob, site: Site) -> bool:
    minimizes = parsed.spec is not None and parsed.spec.objective.minimize is Minimize.CARBON
    return minimizes or not site.energy.carbon.assumed
