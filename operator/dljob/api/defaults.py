"""JobDefaults: what an administrator sets once per installation (chart value ``jobDefaults``) for all jobs.

Sections and fields have the names of the spec. A field can have such a default only if the API server stores no
built-in default for it. In fields such as ``runPolicy.backoffLimit``, the API server stores the built-in default, which
the operator cannot tell from a user's value.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dljob.api.base import ApiModel, DnsSubdomain, LabelKey, LabelValue
from dljob.api.spec.pods import Disruption
from dljob.api.spec.trainer import Scratch
from dljob.cluster import quantity
from dljob.cluster.catalogue import gpu


class DefaultToleration(ApiModel):
    """A toleration, checked as strictly as the API server checks one in a pod spec."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError(
                "key: found no key without operator Exists; expected one of them. Set key, or set operator to Exists"
            )
        if self.operator == "Exists" and self.value:
            raise ValueError(
                "value: found a value with operator Exists, which matches all values; expected no value. Remove value, "
                "or choose operator Equal"
            )
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(
                "tolerationSeconds: found this field without effect NoExecute; expected both. Set effect to NoExecute, "
                "or remove tolerationSeconds"
            )
        return self


class TrainerDefaults(ApiModel):
    image_pull_secrets: Annotated[tuple[DnsSubdomain, ...] | None, Field(max_length=16)] = None
    """Secrets for pulling images, which must exist in the namespace of each job."""
    scratch: Scratch | None = None


class SchedulingDefaults(ApiModel):
    node_selector: Annotated[dict[LabelKey, LabelValue] | None, Field(max_length=64)] = None
    tolerations: Annotated[tuple[DefaultToleration, ...] | None, Field(max_length=64)] = None
    disruption: Disruption | None = None
    priority_class_name: DnsSubdomain | None = None
    runtime_class_name: DnsSubdomain | None = None
    """Runtime class of the pods. The spec has no such field, but ``spec.podTemplateOverrides`` can change the class."""
    scheduler_name: DnsSubdomain | None = None
    pod_group_label: LabelKey | None = None


class RunPolicyDefaults(ApiModel):
    active_deadline_seconds: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    ttl_seconds_after_finished: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None


class VolumeDefaults(ApiModel):
    storage_class_name: DnsSubdomain | None = None
    shared: bool | None = None
    """Default of ``spec.checkpoint.volume.shared``. It applies only to jobs that do not set their own storage class."""


class CheckpointDefaults(ApiModel):
    volume: VolumeDefaults | None = None


Price = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class PriceDefaults(ApiModel):
    """Prices in US dollars, with which the planner computes costs."""

    usd_per_device_hour: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=63)], Price] | None, Field(max_length=64)
    ] = None
    """Device type → price of one device per hour. For CPU nodes, it is the price of one CPU."""
    usd_per_kwh: Price | None = None

    @model_validator(mode="after")
    def _one_price_for_each_gpu(self) -> Self:
        names: dict[str, str] = {}
        for label in self.usd_per_device_hour or ():
            known = gpu(label)
            if (other := names.setdefault(known.name if known else label, label)) != label:
                raise ValueError(
                    f"usdPerDeviceHour: found {other} and {label}, two names of one GPU; expected one name of each "
                    "GPU. Remove one of the two names"
                )
        return self


Watts = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
GramsPerKwh = Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)]


class CarbonDefaults(ApiModel):
    """Greenhouse gases of the electricity in g CO2 equivalent per kWh: one value, or one for each hour of the day."""

    grams_per_kwh: GramsPerKwh | None = None
    grams_per_kwh_by_hour: Annotated[tuple[GramsPerKwh, ...] | None, Field(min_length=24, max_length=24)] = None
    """Values for the hours 0 to 23 UTC."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.grams_per_kwh is not None and self.grams_per_kwh_by_hour is not None:
            raise ValueError(
                "gramsPerKwh: found together with gramsPerKwhByHour; expected one of them. Remove one of them"
            )
        return self


class EnergyDefaults(ApiModel):
    """Power and carbon, with which the planner and the status compute the energy and the carbon of jobs."""

    idle_watts: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=63)], Watts] | None, Field(max_length=64)
    ] = None
    """Device type → power of one idle device. For CPU nodes, it is the power of one CPU."""
    host_watts_per_gpu: Watts | None = None
    """Power of the rest of a GPU node, for each of its GPUs."""
    pue: Annotated[float | None, Field(ge=1, le=10, allow_inf_nan=False)] = None
    """Power of the data centre divided by that of its computers (power usage effectiveness)."""
    carbon: CarbonDefaults | None = None


class SpotLabel(ApiModel):
    key: LabelKey
    value: LabelValue


class SpotDefaults(ApiModel):
    """Spot nodes, which the cloud may take back at any time."""

    labels: Annotated[tuple[SpotLabel, ...] | None, Field(min_length=1, max_length=16)] = None
    """A node with any of these labels is a spot node. None: the labels of large clouds."""
    price_factor: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    """Price of a spot node divided by the price of the same node on demand. None: 1."""
    interruptions_per_hour: Annotated[float | None, Field(ge=0, le=60, allow_inf_nan=False)] = None
    """Interruptions per hour of one node. None: 0."""


class NetworkDefaults(ApiModel):
    """The network between two zones or two racks. If a field is unset, the value is that within one zone or rack."""

    bandwidth: Annotated[str | None, Field(max_length=32)] = None
    """Bandwidth of one node to other zones or racks in bytes per second, as a Kubernetes quantity such as 250M."""
    latency_seconds: Annotated[float | None, Field(ge=0, le=10, allow_inf_nan=False)] = None

    @field_validator("bandwidth")
    @classmethod
    def _is_positive(cls, value: str | None) -> str | None:
        return _bandwidth(value)


class DatasetDefaults(ApiModel):
    """The server or object store from which nodes fetch data."""

    source_bandwidth: Annotated[str | None, Field(max_length=32)] = None
    """Bandwidth for all nodes together in bytes per second, as a Kubernetes quantity such as 5G. None: assumed."""

    @field_validator("source_bandwidth")
    @classmethod
    def _is_positive(cls, value: str | None) -> str | None:
        return _bandwidth(value)


def _bandwidth(value: str | None) -> str | None:
    """Return ``value`` if it is None, or a quantity that is more than 0. Otherwise raise ValueError."""
    if value is not None and quantity(value) <= 0:
        raise ValueError(f"found {value!r}; expected more than 0. Give bytes per second, such as 250M")
    return value


class TopologyDefaults(ApiModel):
    """The network between zones and between racks."""

    rack_label: LabelKey | None = None
    between_zones: NetworkDefaults | None = None
    between_racks: NetworkDefaults | None = None


class JobDefaults(ApiModel):
    trainer: TrainerDefaults | None = None
    scheduling: SchedulingDefaults | None = None
    run_policy: RunPolicyDefaults | None = None
    checkpoint: CheckpointDefaults | None = None
    prices: PriceDefaults | None = None
    energy: EnergyDefaults | None = None
    spot: SpotDefaults | None = None
    topology: TopologyDefaults | None = None
    dataset: DatasetDefaults | None = None

    @property
    def empty(self) -> bool:
        """Return True if the administrator has set no default. Empty texts, lists and sections do not count."""
        return not _values(self.manifest())

    @property
    def runtime_class_name(self) -> str | None:
        return self.scheduling.runtime_class_name if self.scheduling else None


def _values(document: Mapping[str, object]) -> list[object]:
    """Return all values in a nested mapping, in one list, except nested mappings, empty lists and empty texts."""
    found: list[object] = []
    for value in document.values():
        if isinstance(value, Mapping):
            found += _values(value)
        elif value not in ([], ""):
            found.append(value)
    return found


NO_DEFAULTS = JobDefaults()
