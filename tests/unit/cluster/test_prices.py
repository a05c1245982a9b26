"""Tests of an administrator's prices: which device they apply to, and what they change in the plan."""

from dataclasses import replace

import pytest

from dljob.cluster import catalogue
from dljob.cluster.prices import CATALOGUE_PRICES, Prices
from dljob.planner import Decision
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, view

HALF = f"{A100}-MIG-3g.20gb"


def price(prices: Prices, label: str) -> float:
    return prices.device(catalogue.gpu_or_assumed(label), label, 1.0).usd_per_h


@pytest.mark.parametrize(
    ("listed", "label", "expected"),
    [
        ({A100: 9.0}, A100, 9.0),
        ({"a100-sxm4-40gb": 9.0}, A100, 9.0),
        ({A100: 9.0}, f"{A100}-SHARED", 9.0),
        ({A100: 7.0}, HALF, 3.0),
        ({A100: 7.0, HALF: 5.0}, HALF, 5.0),
        ({"Some-GPU": 4.0}, "Some-GPU", 4.0),
        ({"Some-GPU": 4.0}, "Other-GPU", catalogue.gpu_or_assumed("Other-GPU").usd_per_h),
        ({T4: 4.0}, A100, catalogue.gpu_or_assumed(A100).usd_per_h),
        ({"cpu": 4.0}, A100, catalogue.gpu_or_assumed(A100).usd_per_h),
    ],
)
def test_price_applies_to_the_device_that_it_names(listed: dict[str, float], label: str, expected: float) -> None:
    assert price(Prices(listed), label) == pytest.approx(expected)


def test_price_of_cpu_nodes_is_per_cpu() -> None:
    assert Prices({"cpu": 0.5}).device(catalogue.cpu("cpu", 4), "cpu", 4.0).usd_per_h == 2.0
    assert Prices({"other": 0.5}).device(catalogue.cpu("cpu", 4), "cpu", 4.0) == catalogue.cpu("cpu", 4)


def test_without_prices_devices_and_costs_are_unchanged() -> None:
    device = catalogue.gpu_or_assumed(A100)
    assert CATALOGUE_PRICES.device(device, A100, 1.0) is device
    assert CATALOGUE_PRICES.with_energy_usd(3.0, float("inf")) == 3.0


def cost(found: Decision) -> float:
    assert found.chosen.prediction.cost_usd is not None
    return found.chosen.prediction.cost_usd


def test_cost_of_a_plan_is_proportional_to_the_price() -> None:
    cheap, dear = (decided(replace(DIGITS, prices=Prices({"cpu": usd})), THREE) for usd in (0.02, 0.2))
    assert cheap.chosen.summary == dear.chosen.summary
    assert cost(dear) == pytest.approx(10 * cost(cheap))


@pytest.mark.parametrize("strategy", ["Data", "Pipeline"])
def test_price_of_energy_is_added(strategy: str) -> None:
    split = {"stages": 2, "micro_batches": 8} if strategy == "Pipeline" else {}
    request = replace(DIGITS, strategy=strategy, **split)  # type: ignore[arg-type]
    without, found = (decided(replace(request, prices=Prices({}, usd)), THREE) for usd in (None, 2.0))
    energy_J = found.chosen.prediction.energy_J
    assert energy_J is not None
    assert cost(found) == pytest.approx(cost(without) + 2.0 * energy_J / 3.6e6)


def test_prices_decide_which_devices_cost_least() -> None:
    cluster = view(
        {"device": A100, "devices": 1, "cpu": 16, "memory": "128Gi"},
        {"device": T4, "devices": 1, "cpu": 16, "memory": "128Gi"},
    )
    request = replace(RESNET, global_batch=32, minimize="Cost", nodes_max=1)
    for cheap, dear in ((A100, T4), (T4, A100)):
        found = decided(replace(request, prices=Prices({cheap: 0.001, dear: 100.0})), cluster)
        assert [group.device for group in found.chosen.groups] == [cheap]
