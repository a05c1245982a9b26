"""Laws of what a job has used so far, as its status shows it."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import MeasuredEnergy, RunPhase
from dljob.api import EnergySource, Usage, UsageRate
from dljob.cluster.prices import J_PER_KWH
from dljob.job.defaults import parse_defaults
from dljob.job.observed import Observed
from dljob.reconcile import Desired, reconcile
from support.builders import CONFIG, DIGITS, NOW, Json, after, nodes, report, seen, settled
from support.job_lifecycle import done, gone, started, status, step, training

CARBON = DIGITS | {"objective": {"minimize": "Carbon"}}


def usage(desired: Desired) -> Usage:
    found = status(desired).usage
    assert found is not None
    return found


def reported(observed: Observed, **changes: Any) -> Observed:
    return replace(observed, report=report(observed, **changes))


def test_job_without_pods_has_used_nothing() -> None:
    first = seen()
    assert status(step(first)).usage is None
    assert status(step(after(first, step(first)), 100)).usage is None


def test_use_is_rate_times_seconds() -> None:
    observed = started()
    begun = step(observed)
    rate = usage(begun).rate
    assert usage(begun) == Usage(time=NOW, rate=rate) and rate.devices > 0 and rate.watts > 0 and rate.cost_per_hour > 0
    observed = reported(after(observed, begun), step=10)
    found = usage(step(observed, 1800))
    assert found.device_seconds == pytest.approx(1800 * rate.devices)
    assert found.energy_joules == pytest.approx(1800 * rate.watts, rel=1e-3)
    assert found.cost == pytest.approx(rate.cost_per_hour / 2, rel=1e-3)
    assert (found.energy_source, found.carbon_grams, found.time) == (
        EnergySource.MODELLED, None, NOW + timedelta(seconds=1800),
    )  # fmt: skip


def test_rate_agrees_with_the_prediction() -> None:
    """Whatever the length of the training, its predicted energy and cost are the rate times its predicted time."""
    found = status(step(started()))
    assert found.plan is not None and found.usage is not None
    predicted = found.plan.predicted
    assert predicted.energy_joules is not None and predicted.cost is not None
    assert found.usage.rate.watts * predicted.total_seconds == pytest.approx(predicted.energy_joules, rel=1e-2)
    assert found.usage.rate.cost_per_hour * predicted.total_seconds / 3600 == pytest.approx(predicted.cost, rel=1e-2)


def test_status_is_not_written_only_because_time_passes() -> None:
    observed = training()
    again = after(observed, step(observed, 60))
    assert status(step(again, 600)) == status(step(again, 60)) == status(step(observed, 60))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6))
def test_use_does_not_depend_on_when_the_operator_looked(times: list[int]) -> None:
    observed = training()
    for n, seconds in enumerate(sorted(times)):
        observed = reported(observed, step=20 + n)
        observed = after(observed, step(observed, seconds))
    end = reported(training(), step=99)
    whole, parts = usage(step(end, 6000)), usage(step(reported(observed, step=99), 6000))
    assert parts.model_copy(update={"energy_joules": whole.energy_joules, "cost": whole.cost}) == whole
    roundings = len(times) + 2  # of each part and of the whole, each by at most 0.05
    assert parts.energy_joules == pytest.approx(whole.energy_joules, abs=0.05 * roundings + 1e-6)
    assert parts.cost == pytest.approx(whole.cost, abs=1e-6 * (1 + len(times)))


def test_use_ends_with_the_pods() -> None:
    observed = done()
    ended = after(observed, step(observed, 600))
    left = gone(ended)
    final = step(left, 620)
    assert usage(final).rate == UsageRate()
    later = after(left, final)
    assert status(step(later, 9999)) == status(final)
    assert usage(final).device_seconds == pytest.approx(620 * usage(step(started())).rate.devices)


def test_counters_replace_the_prediction_of_what_they_measure() -> None:
    observed = training()
    modelled = usage(step(observed)).rate.watts
    half = reported(observed, step=20, energy=MeasuredEnergy(joules=1000.0, part=0.5))
    first = step(half, 100)
    assert usage(first).energy_joules == pytest.approx(100 * modelled + 1.4 * 1000, rel=1e-3)
    assert usage(first).energy_source is EnergySource.MIXED and usage(first).rate.watts == pytest.approx(
        modelled / 2, rel=1e-3
    )
    whole = reported(after(half, first), step=30, energy=MeasuredEnergy(joules=1500.0, part=1.0))
    second = step(whole, 200)
    assert usage(second).energy_joules - usage(first).energy_joules == pytest.approx(
        50 * modelled + 1.4 * 500, rel=1e-3
    )
    assert usage(second).rate.watts == 0, "CPUs have no host besides"
    again = reported(after(whole, second), step=40, energy=MeasuredEnergy(joules=100.0, part=1.0))
    third = step(again, 300)
    assert usage(third).energy_joules - usage(second).energy_joules == pytest.approx(140), "the sum began again at 0"


def test_energy_that_counters_have_measured_has_its_price() -> None:
    """Fixed bug: the predicted energy was paid, also where counters had measured it."""

    def cost(joules: float, **prices: float) -> float:
        config = replace(CONFIG, job_defaults=parse_defaults({"prices": prices} if prices else {}))
        first = seen()
        placed = settled(after(first, reconcile(first, config, NOW)))
        observed = reported(placed, step=20, energy=MeasuredEnergy(joules=0.0, part=1.0))
        begun = reconcile(observed, config, NOW)
        ended = reported(after(observed, begun), step=30, energy=MeasuredEnergy(joules=joules, part=1.0))
        return usage(reconcile(ended, config, NOW + timedelta(hours=1))).cost - usage(begun).cost

    free, one, two = cost(0.0, usdPerKwh=10.0), cost(J_PER_KWH, usdPerKwh=10.0), cost(2 * J_PER_KWH, usdPerKwh=10.0)
    assert one - free == pytest.approx(1.4 * 10.0) and two - free == pytest.approx(2 * 1.4 * 10.0)
    assert free == pytest.approx(cost(J_PER_KWH), rel=1e-3), "the devices have their price besides"


def test_counters_of_all_devices_are_measured_energy() -> None:
    observed = reported(started(), step=20, energy=MeasuredEnergy(joules=10.0, part=1.0))
    first = after(observed, step(observed, 1))
    found = usage(step(reported(first, step=21, energy=MeasuredEnergy(joules=20.0, part=1.0)), 2))
    assert found.energy_source is EnergySource.MEASURED and found.counted_joules == 20.0


def test_carbon_is_energy_times_intensity() -> None:
    observed = training(CARBON)
    found = usage(step(reported(after(observed, step(observed)), step=20), 3600))
    assert found.carbon_grams == pytest.approx(found.energy_joules / J_PER_KWH * 473, rel=1e-3)


def test_part_of_the_pods_has_part_of_the_rate() -> None:
    observed = started()
    whole = usage(step(observed)).rate
    some = replace(observed, pods=observed.pods[:1])
    part = usage(step(some)).rate
    assert part.devices == pytest.approx(whole.devices / len(observed.pods))
    assert part.watts == pytest.approx(whole.watts / len(observed.pods), rel=1e-2)


def test_job_without_prediction_has_use() -> None:
    """A script of which only image, command and nodes are known costs money, too."""
    script: Json = {
        "nodes": {"min": 2, "max": 2}, "trainer": {"framework": "Torchrun", "command": ["python", "train.py"]},
    }  # fmt: skip
    found = usage(step(settled(after(first := seen(script), step(first)))))
    assert found.rate.devices > 0 and found.rate.watts > 0 and found.rate.cost_per_hour > 0


def test_clock_that_is_set_back_subtracts_nothing() -> None:
    observed = reported(training(), step=20)
    first = step(observed, 1000)
    back = step(reported(after(observed, first), step=30), 10)
    assert usage(back).device_seconds == usage(first).device_seconds and usage(back).time == usage(first).time


def test_ranks_that_start_again_read_no_counter_yet() -> None:
    observed = training()
    counted = MeasuredEnergy(joules=10.0, part=1.0)
    observed = replace(observed, report=report(observed, RunPhase.RESTARTING, step=20, energy=counted))
    assert usage(step(observed, 10)).rate.watts > 0


def test_script_on_spot_nodes_pays_their_price() -> None:
    """Fixed bug: without a predicted cost, the use on spot nodes had the price on demand."""
    spec: Json = {
        "trainer": {"image": "registry.example/ours:7", "command": ["torchrun", "train.py"], "framework": "Torchrun"}
    }
    spec |= {"nodes": {"min": 2}}
    labels = {"karpenter.sh/capacity-type": "spot"}
    view = nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi", "labels": labels})

    def usd_per_h(**spot: float) -> float:
        config = replace(CONFIG, job_defaults=parse_defaults({"spot": spot} if spot else {}))
        first = seen(spec, view)
        observed = settled(after(first, reconcile(first, config, NOW)))
        return usage(reconcile(observed, config, NOW)).rate.cost_per_hour

    assert usd_per_h(priceFactor=0.3) == pytest.approx(0.3 * usd_per_h(), rel=1e-4)
