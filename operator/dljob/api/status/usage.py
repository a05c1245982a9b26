"""Devices, energy, money and carbon that a job has used so far."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel

Amount = Annotated[float, Field(ge=0)]


class EnergySource(StrEnum):
    """Origin of the values of a job's energy: counters, predictions or both."""

    MEASURED = "Measured"
    MODELLED = "Modelled"
    MIXED = "Mixed"


class UsageRate(ApiModel):
    """Resources that the job's pods use at present: devices, watts, and money and carbon per hour."""

    devices: Annotated[Amount, Field(description="GPUs and CPUs.")] = 0
    watts: Annotated[
        Amount,
        Field(
            description="Predicted power of the parts that no energy counter measures, with hosts and the data "
            "centre's overhead."
        ),
    ] = 0
    cost_per_hour: Annotated[Amount, Field(description="US dollars per hour.")] = 0


class Usage(ApiModel):
    """Resources that all attempts of the job have used, from its first pods to ``time``."""

    time: Annotated[datetime, Field(description="Time until which the use is counted.")]
    rate: Annotated[UsageRate, Field(description="Resources that the pods have used since time.")] = UsageRate()
    device_seconds: Annotated[
        Amount, Field(description="GPUs and CPUs, times the seconds for which pods had them.")
    ] = 0
    energy_joules: Annotated[Amount, Field(description="Energy, with hosts and the data centre's overhead.")] = 0
    energy_source: Annotated[
        EnergySource,
        Field(
            description="Measured: energy counters of all devices (NVML, RAPL). Modelled: predicted power, because no "
            "counter is readable. Mixed: both. Hosts of GPUs and the data centre's overhead are always modelled."
        ),
    ] = EnergySource.MODELLED
    counted_joules: Annotated[
        Amount, Field(description="Last sum of the counters that the job has reported; 0 without counters.")
    ] = 0
    cost: Annotated[Amount, Field(description="US dollars.")] = 0
    carbon_grams: Annotated[
        float | None,
        Field(
            ge=0,
            description="CO2 equivalent of the energy, in grams. Unset if the administrator has set no carbon "
            "intensity and the job does not minimize carbon.",
        ),
    ] = None
