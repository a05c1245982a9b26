"""Tests of the node label with the power limit of GPUs: the device type that it makes, and values that are wrong."""

import pytest

from dlcontract.pods import with_power_limit, without_power_limit
from dljob.cluster import catalogue
from dljob.cluster.energy import EnergySettings
from dljob.cluster.power_limits import POWER_LIMIT_LABEL, device_type, power_limit_error
from dljob.cluster.prices import Prices
from support.planner_questions import A100, view

PART = f"{A100}-MIG-3g.20gb"


@pytest.mark.parametrize(
    ("product", "is_gpu", "limit", "expected"),
    [
        (A100, True, None, A100),
        (A100, True, "250", f"{A100}@250W"),
        (A100, True, "400", f"{A100}@400W"),
        ("NVIDIA-X9000", True, "1200", "NVIDIA-X9000@1200W"),
        (PART, True, "250", f"{PART}@250W"),
        ("cpu", False, "250", "cpu"),
        (A100, True, "401", A100),
    ],
    ids=["no label", "limit", "the peak power", "not in the catalogue", "part of a GPU", "CPU node", "wrong"],
)
def test_label_makes_a_device_type(product: str, is_gpu: bool, limit: str | None, expected: str) -> None:
    labels = {} if limit is None else {POWER_LIMIT_LABEL: limit}
    assert device_type(product, is_gpu, labels) == expected
    assert without_power_limit(expected)[0] == product


@pytest.mark.parametrize("device", [A100, "cpu", "A@W", "A@0W", "A@-5W", "A@250", "@250W"])
def test_other_names_have_no_limit(device: str) -> None:
    assert without_power_limit(device) == (device, None)


def test_type_has_its_product_and_its_limit() -> None:
    assert without_power_limit(with_power_limit(A100, 250)) == (A100, 250)


@pytest.mark.parametrize(
    ("product", "limit", "expected"),
    [
        (A100, "401", "above 50 and at most 400"),
        (A100, "50", "above 50 and at most 400"),
        (A100, "0", "a whole number of watts"),
        (A100, "-250", "a whole number of watts"),
        (A100, "250W", "a whole number of watts"),
        (A100, "150-300", "a whole number of watts"),
        (A100, "", "a whole number of watts"),
        (A100, "9" * 60, "a whole number of watts"),
        ("NVIDIA-X9000", "10000", "above 0 and at most 9999"),
        (PART, "401", "above 50 and at most 400"),
        ("N" * 60, "250", "shorter by 2"),
    ],
)
def test_wrong_limit_is_one_doubt_with_node_value_and_remedy(product: str, limit: str, expected: str) -> None:
    error = power_limit_error("n7", product, True, {POWER_LIMIT_LABEL: limit})
    assert error is not None and expected in error
    assert f"node n7: found '{limit}'" in error and "remove it" in error
    assert device_type(product, True, {POWER_LIMIT_LABEL: limit}) == product


def test_cluster_file_states_the_limit_in_short() -> None:
    short, long, bad = view(
        {"device": A100, "powerLimit": 250},
        {"device": A100, "labels": {POWER_LIMIT_LABEL: "250"}},
        {"device": A100, "powerLimit": "low"},
    ).nodes
    assert (short.device, short.labels, short.left_out) == (f"{A100}@250W", {POWER_LIMIT_LABEL: "250"}, None)
    assert (long.device, long.labels) == (short.device, short.labels)
    assert bad.device == A100 and bad.left_out is not None and "node n2: found 'low'" in bad.left_out


def test_catalogue_has_the_data_sheet_with_the_limit() -> None:
    whole, limited = catalogue.gpu(A100), catalogue.gpu(f"{A100}@250W")
    assert whole is not None and limited is not None
    assert (limited.power_limit_W, limited.peak_power_W, limited.fp32_FLOPs) == (250, 400, whole.fp32_FLOPs)
    part = catalogue.gpu_or_assumed(f"{PART}@210W")
    assert part.power_limit_W == pytest.approx(90) and part.memory_nbytes == 20 * 2**30
    assert catalogue.gpu_or_assumed("NVIDIA-X9000@250W").power_limit_W is None, "nothing is known of its power"
    assert catalogue.vendor("AMD_Instinct_MI300X_OAM@550W") == "amd"


@pytest.mark.parametrize(
    ("listed", "usd"),
    [({A100: 9.0}, 9.0), ({"a100-sxm4-40gb": 9.0}, 9.0), ({A100: 9.0, f"{A100}@250W": 5.0}, 5.0)],
    ids=["of the product", "other spelling", "of the limit"],
)
def test_settings_for_the_product_apply_under_a_limit(listed: dict[str, float], usd: float) -> None:
    label = f"{A100}@250W"
    device = catalogue.gpu_or_assumed(label)
    assert Prices(listed).device(device, label, 1.0).usd_per_h == usd
    assert EnergySettings(idle_W=listed).device(device, label, 1.0).idle_power_W == usd
