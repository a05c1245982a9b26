"""Fill unset fields of a job's spec with the administrator's defaults, and list the values that come from these.

A value of the job takes precedence over a default. Node selectors are merged label by label, and the default
tolerations are added to the job's own.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dljob.api import DLJobSpec
from dljob.api.defaults import (
    CarbonDefaults,
    CheckpointDefaults,
    EnergyDefaults,
    JobDefaults,
    NetworkDefaults,
    PriceDefaults,
    RunPolicyDefaults,
    SchedulingDefaults,
    SpotDefaults,
    TopologyDefaults,
    TrainerDefaults,
    VolumeDefaults,
)
from dljob.cluster import quantity
from dljob.cluster.domains import RACK_LABEL, SPOT_LABELS, Crossing, Spot, Topology
from dljob.cluster.energy import CarbonIntensity, EnergySettings
from dljob.cluster.prices import CATALOGUE_PRICES, Prices, listed
from dljob.cluster.site import Site
from dljob.job.spec_errors import in_words

ROOT = "jobDefaults"
"""Name of the chart value with the defaults. Error messages about a default begin with it."""
REFERENCE = "the section jobDefaults of charts/dljob/README.md"


def parse_defaults(document: object) -> JobDefaults:
    """Return the defaults from the chart value ``jobDefaults``, as read from JSON or YAML.

    Raise ValueError with the field, its value and what is expected.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{ROOT}: found {document!r:.100}; expected a mapping such as {{scheduling: {{...}}}}")  # noqa: TRY004 - user input
    try:
        return JobDefaults.model_validate(document)
    except ValidationError as error:
        raise ValueError(in_words(error, ROOT, REFERENCE)) from None


def with_defaults(spec: DLJobSpec, defaults: JobDefaults) -> DLJobSpec:
    """Return the spec with the defaults in place of its unset fields. If no default is set, return ``spec`` itself."""
    if defaults.empty:
        return spec
    scheduling, policy = defaults.scheduling or SchedulingDefaults(), defaults.run_policy or RunPolicyDefaults()
    trainer, checkpoint = defaults.trainer or TrainerDefaults(), defaults.checkpoint or CheckpointDefaults()
    volume, own = checkpoint.volume or VolumeDefaults(), spec.scheduling
    tolerations = [item.manifest() for item in scheduling.tolerations or ()]
    changes = {
        "trainer": _completed(spec.trainer, image_pull_secrets=trainer.image_pull_secrets, scratch=trainer.scratch),
        "scheduling": own.model_copy(
            update={
                "node_selector": {**(scheduling.node_selector or {}), **own.node_selector},
                "tolerations": (*own.tolerations, *(item for item in tolerations if item not in own.tolerations)),
                **_unset(
                    own,
                    disruption=scheduling.disruption,
                    priority_class_name=scheduling.priority_class_name,
                    scheduler_name=scheduling.scheduler_name,
                    pod_group_label=scheduling.pod_group_label,
                ),
            }
        ),
        "run_policy": _completed(
            spec.run_policy,
            active_deadline_seconds=policy.active_deadline_seconds,
            ttl_seconds_after_finished=policy.ttl_seconds_after_finished,
        ),
    }
    if spec.checkpoint.creates_claim:
        shared = volume.shared if spec.checkpoint.volume.storage_class_name is None else None
        claimed = _completed(spec.checkpoint.volume, storage_class_name=volume.storage_class_name, shared=shared)
        changes["checkpoint"] = spec.checkpoint.model_copy(update={"volume": claimed})
    return spec.model_copy(update=changes)


def _completed(section: Any, **defaults: object) -> Any:
    return section.model_copy(update=_unset(section, **defaults))


def _unset(section: Any, **defaults: object) -> dict[str, object]:
    """Return field → default for the fields that are unset in ``section`` and whose default has a value.

    ``section``: a part of the spec, such as ``spec.scheduling``.
    """
    return {
        name: value
        for name, value in defaults.items()
        if value is not None and value != () and getattr(section, name) in (None, ())
    }


def applied(spec: DLJobSpec, defaults: JobDefaults) -> tuple[str, ...]:
    """Return a line for each value of a job that comes from the defaults, such as 'scheduling.schedulerName: gang'."""
    if defaults.empty:
        return ()
    full = with_defaults(spec, defaults)
    lines = [f"{path}: {value}" for path, value in _changed(spec.manifest(), full.manifest())]
    if defaults.runtime_class_name:
        lines.append(f"scheduling.runtimeClassName: {defaults.runtime_class_name}")
    return tuple(lines)


def applied_site(defaults: JobDefaults, devices: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each price and each figure about energy in the defaults that applies to these device types.

    Examples: 'prices.usdPerKwh: 0.3', 'energy.pue: 1.2'.
    """
    site, kinds = site_of(defaults), sorted(set(devices))
    tables = (("prices.usdPerDeviceHour", site.prices.usd_per_device_h), ("energy.idleWatts", site.energy.idle_W))
    lines = [
        f"{name}: {device}={value:g}"
        for name, values in tables
        for device in kinds
        if (value := listed(values, device)) is not None
    ]
    carbon = site.energy.carbon
    by_hour = len(carbon.g_per_kwh) > 1
    single = {
        "prices.usdPerKwh": site.prices.usd_per_kwh,
        "energy.hostWattsPerGpu": site.energy.gpu_host_W,
        "energy.pue": site.energy.pue,
        "energy.carbon.gramsPerKwh": None if carbon.assumed or by_hour else carbon.g_per_kwh[0],
    }
    lines += [f"{name}: {value:g}" for name, value in single.items() if value is not None]
    if by_hour:
        least, most = min(carbon.g_per_kwh), max(carbon.g_per_kwh)
        lines.append(f"energy.carbon.gramsPerKwhByHour: {least:g} to {most:g}")
    return tuple(lines)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text of the value) for each field whose value in ``after`` differs from that in ``before``.

    For node selectors and tolerations, the text contains only the entries that were added. ``path``: path of the
    mappings in the spec, which precedes the names of their fields.
    """
    for key, value in after.items():
        here, old = f"{path}.{key}".lstrip("."), before.get(key)
        if value == old:
            continue
        if key == "nodeSelector":
            known = old or {}
            yield here, ",".join(f"{label}={text}" for label, text in value.items() if label not in known)
        elif key == "tolerations":
            yield here, ", ".join(_toleration(item) for item in value if item not in (old or []))
        elif isinstance(value, Mapping):
            yield from _changed(old or {}, value, here)
        elif isinstance(value, bool):
            yield here, str(value).lower()
        else:
            yield here, ", ".join(value) if isinstance(value, list) else str(value)


def _toleration(item: Mapping[str, Any]) -> str:
    """Return a toleration as kubectl prints a taint: key=value:effect."""
    value = f"={item['value']}" if item.get("value") else ""
    return f"{item.get('key', '*')}{value}:{item.get('effect', '*')}"


def is_default(lines: Iterable[str] | None, field: str) -> bool:
    """Return True if the value of a field comes from the defaults. ``field``: path, such as scheduling.schedulerName.

    ``lines``: lines that ``applied`` returned for the job; None: no value comes from the defaults.
    """
    return any(line.startswith(f"{field}: ") for line in lines or ())


def prices_of(defaults: JobDefaults) -> Prices:
    prices = defaults.prices or PriceDefaults()
    if not prices.usd_per_device_hour and prices.usd_per_kwh is None:
        return CATALOGUE_PRICES
    return Prices(prices.usd_per_device_hour or {}, prices.usd_per_kwh)


def energy_of(defaults: JobDefaults) -> EnergySettings:
    found = defaults.energy or EnergyDefaults()
    given = found.carbon or CarbonDefaults()
    carbon = CarbonIntensity()
    if given.grams_per_kwh_by_hour is not None:
        carbon = CarbonIntensity(given.grams_per_kwh_by_hour, assumed=False)
    elif given.grams_per_kwh is not None:
        carbon = CarbonIntensity((given.grams_per_kwh,), assumed=False)
    return EnergySettings(found.idle_watts or {}, found.host_watts_per_gpu, found.pue, carbon)


def site_of(defaults: JobDefaults) -> Site:
    """Return what the administrator states about the cluster, with assumptions in place of what is unset."""
    source = defaults.dataset.source_bandwidth if defaults.dataset is not None else None
    source_Bps = None if source is None else float(quantity(source))
    return Site(prices_of(defaults), energy_of(defaults), topology_of(defaults), spot_of(defaults), source_Bps)


def spot_of(defaults: JobDefaults) -> Spot:
    """Return the administrator's description of spot nodes: labels, price factor and interruptions per hour.

    The price factor is the price of a spot node divided by that of another node. Without labels from the administrator,
    use those of the large clouds. Without a price factor, use 1. Without an interruption rate, use 0.
    """
    found = defaults.spot or SpotDefaults()
    labels = SPOT_LABELS if found.labels is None else tuple((item.key, item.value) for item in found.labels)
    factor = 1.0 if found.price_factor is None else found.price_factor
    return Spot(labels, factor, found.interruptions_per_hour or 0.0)


def topology_of(defaults: JobDefaults) -> Topology:
    """Return bandwidth and latency of the network between zones and between racks, and the label that names a rack.

    If the administrator gives neither bandwidth nor latency, the planner assumes that traffic between zones (or racks)
    is as fast as traffic within one zone (or rack). The label is a node label. If it is unset, use ``RACK_LABEL``.
    """
    found = defaults.topology or TopologyDefaults()
    return Topology(_crossing(found.between_zones), _crossing(found.between_racks), found.rack_label or RACK_LABEL)


def _crossing(found: NetworkDefaults | None) -> Crossing | None:
    if found is None or (found.bandwidth is None and found.latency_seconds is None):
        return None
    return Crossing(None if found.bandwidth is None else float(quantity(found.bandwidth)), found.latency_seconds)
