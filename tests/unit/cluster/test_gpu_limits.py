"""Tests of the node labels with the limits of GPUs: the device types that they make, and values that are wrong."""

import pytest

from dlcontract.pods import DeviceLimits, with_limits, without_limits
from dljob.cluster import catalogue
from dljob.cluster.energy import EnergySettings
from dljob.cluster.gpu_limits import CLOCK_LIMIT_LABEL, POWER_LIMIT_LABEL, device_type, limit_error
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
    assert without_limits(expected).product == product


@pytest.mark.parametrize("device", [A100, "cpu", "A@W", "A@0W", "A@-5W", "A@250", "@250W"])
def test_other_names_have_no_limit(device: str) -> None:
    assert without_limits(device) == DeviceLimits(device)


@pytest.mark.parametrize("product", [A100, "NVIDIA-X9000", "AMD_Instinct_MI300X_OAM", PART])
@pytest.mark.parametrize("power_W", [None, 1, 250])
@pytest.mark.parametrize("clock_MHz", [None, 1, 1200])
def test_type_has_its_product_and_its_limits(product: str, power_W: int | None, clock_MHz: int | None) -> None:
    assert without_limits(with_limits(product, power_W, clock_MHz)) == (product, power_W, clock_MHz)


@pytest.mark.parametrize(
    ("product", "clock", "power", "expected"),
    [
        (A100, "1200", None, f"{A100}@1200MHz"),
        (A100, "1410", None, f"{A100}@1410MHz"),
        (A100, "1200", "300", f"{A100}@1200MHz@300W"),
        ("NVIDIA-X9000", "9999", None, "NVIDIA-X9000@9999MHz"),
        (PART, "1200", None, f"{PART}@1200MHz"),
        (A100, "1411", "300", A100),
    ],
    ids=["clock", "the maximum clock", "both limits", "not in the catalogue", "part of a GPU", "one is wrong"],
)
def test_clock_limit_is_part_of_the_device_type(product: str, clock: str, power: str | None, expected: str) -> None:
    labels = {CLOCK_LIMIT_LABEL: clock} | ({} if power is None else {POWER_LIMIT_LABEL: power})
    assert device_type(product, True, labels) == expected
    assert device_type("cpu", False, labels) == "cpu" and limit_error("n", "cpu", False, labels) is None


@pytest.mark.parametrize(
    ("product", "clock", "expected"),
    [
        (A100, "0", "a whole number of MHz from 100 to 1410, the maximum clock of a100-sxm4-40gb"),
        (A100, "abc", "a whole number of MHz"),
        (A100, "1411", "from 100 to 1410"),
        (A100, "99", "from 100 to 1410"),
        (A100, "1.2GHz", "a whole number of MHz"),
        (A100, "210,1200", "a whole number of MHz"),
        (A100, "", "a whole number of MHz"),
        ("NVIDIA-X9000", "10000", "from 100 to 9999"),
        (PART, "1411", "from 100 to 1410"),
        ("N" * 58, "250", "shorter by 2"),
    ],
)
def test_wrong_clock_is_one_doubt_with_node_value_and_remedy(product: str, clock: str, expected: str) -> None:
    error = limit_error("n7", product, True, {CLOCK_LIMIT_LABEL: clock})
    assert error is not None and expected in error
    assert f"label {CLOCK_LIMIT_LABEL} of node n7: found '{clock}'" in error and error.endswith("remove it")
    assert device_type(product, True, {CLOCK_LIMIT_LABEL: clock}) == product


def test_one_doubt_names_both_wrong_labels() -> None:
    error = limit_error("n7", A100, True, {CLOCK_LIMIT_LABEL: "abc", POWER_LIMIT_LABEL: "0"})
    assert error is not None and "found 'abc'" in error and "found '0'" in error and error.count("remove it") == 1


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
    error = limit_error("n7", product, True, {POWER_LIMIT_LABEL: limit})
    assert error is not None and expected in error
    assert f"node n7: found '{limit}'" in error and "remove it" in error
    assert device_type(product, True, {POWER_LIMIT_LABEL: limit}) == product


def test_cluster_file_states_the_limit_in_short() -> None:
    short, long, bad = view(
        {"device": A100, "powerLimit": 250},
        {"device": A100, "labels": {POWER_LIMIT_LABEL: "250"}},
        {"device": A100, "labels": {POWER_LIMIT_LABEL: "low"}},
    ).nodes
    (clocked,) = view({"device": A100, "clockLimit": 1200}).nodes
    assert (clocked.device, clocked.labels) == (f"{A100}@1200MHz", {CLOCK_LIMIT_LABEL: "1200"})
    assert (short.device, short.labels, short.left_out) == (f"{A100}@250W", {POWER_LIMIT_LABEL: "250"}, None)
    assert (long.device, long.labels) == (short.device, short.labels)
    assert bad.device == A100 and bad.left_out is not None and "node n2: found 'low'" in bad.left_out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"powerLimit": 4000},
            "powerLimit: found 4000; expected a whole number of watts above 50 and at most 400, the idle and the peak "
            "power of a100-sxm4-40gb. Set it to the limit that nvidia-smi shows, or remove it",
        ),
        ({"powerLimit": "low"}, "powerLimit: found 'low'; expected a whole number of watts"),
        ({"clockLimit": 5000}, "clockLimit: found 5000; expected a whole number of MHz from 100 to 1410"),
        ({"clockLimit": 1200, "powerLimit": 0}, "powerLimit: found 0; expected a whole number of watts"),
        ({"device": f"{A100}-MIG-3g.20gb", "powerLimit": 401}, "powerLimit: found 401; expected a whole number"),
        ({"device": "cpu", "powerLimit": 250}, "powerLimit: found 250 for CPUs; expected it for GPUs only. Remove it"),
    ],
    ids=str,
)
def test_wrong_field_of_a_cluster_file_is_an_error_that_names_it(fields: dict[str, object], message: str) -> None:
    """Fixed bug: the reason why the node was left out named a label, which the file did not have."""
    with pytest.raises(ValueError) as error:
        view({"device": A100}, {"device": A100, **fields})
    assert str(error.value).startswith(f"cluster: nodes[1].{message}")


def test_catalogue_has_the_data_sheet_with_the_limit() -> None:
    whole, limited = catalogue.gpu(A100), catalogue.gpu(f"{A100}@250W")
    assert whole is not None and limited is not None
    assert (limited.power_limit_W, limited.peak_power_W, limited.fp32_FLOPs) == (250, 400, whole.fp32_FLOPs)
    clocked = catalogue.gpu(f"{A100}@1200MHz@250W")
    assert clocked is not None and (clocked.power_limit_W, clocked.clock_limit_MHz) == (250, 1200)
    assert (clocked.max_clock_MHz, clocked.fp32_FLOPs) == (1410, whole.fp32_FLOPs)
    assert catalogue.gpu_or_assumed(f"{PART}@1200MHz").clock_limit_MHz == 1200
    assert catalogue.gpu_or_assumed("NVIDIA-X9000@1200MHz").clock_limit_MHz is None, "nothing is known of its clock"
    part = catalogue.gpu_or_assumed(f"{PART}@210W")
    assert part.power_limit_W == pytest.approx(90) and part.memory_nbytes == 19.5 * 2**30
    assert catalogue.gpu_or_assumed("NVIDIA-X9000@250W").power_limit_W is None, "nothing is known of its power"
    assert catalogue.vendor("AMD_Instinct_MI300X_OAM@550W") == "amd"


@pytest.mark.parametrize(
    ("listed", "usd"),
    [({A100: 9.0}, 9.0), ({"a100-sxm4-40gb": 9.0}, 9.0), ({A100: 9.0, f"{A100}@250W": 5.0}, 5.0)],
    ids=["of the product", "other spelling", "of the limit"],
)
def test_settings_for_the_product_apply_under_a_limit(listed: dict[str, float], usd: float) -> None:
    label = f"{A100}@250W"
    assert Prices(listed).listed(f"{A100}@1200MHz") == listed.get(A100, usd)
    device = catalogue.gpu_or_assumed(label)
    assert Prices(listed).device(device, label, 1.0).usd_per_h == usd
    assert EnergySettings(idle_W=listed).device(device, label, 1.0).idle_power_W == usd
