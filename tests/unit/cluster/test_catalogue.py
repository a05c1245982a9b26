"""Tests of the device catalogue and of cluster files."""

from typing import Any

import pytest

from dljob.cluster import catalogue, cluster_view, quantity

LABELS = {
    "NVIDIA-A100-SXM4-40GB": "a100-sxm4-40gb",
    "NVIDIA-A100-SXM4-80GB": "a100-sxm4-80gb",
    "NVIDIA-A100-80GB-PCIe": "a100-pcie-80gb",
    "NVIDIA-H100-80GB-HBM3": "h100-sxm5-80gb",
    "NVIDIA-H200": "h200-sxm-141gb",
    "Tesla-T4": "t4",
    "Tesla-V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla-P100-PCIE-16GB": "p100-pcie-16gb",
    "NVIDIA-GeForce-RTX-3090": "rtx-3090",
    "NVIDIA-A100-SXM4-40GB-SHARED": "a100-sxm4-40gb",
    "a100 sxm4 40": "a100-sxm4-40gb",
}


@pytest.mark.parametrize(("label", "name"), LABELS.items())
def test_product_label_maps_to_device(label: str, name: str) -> None:
    device = catalogue.gpu(label)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize("label", ["cpu", "cpu-fast", "arm64-node", "a1000", "h", ""])
def test_other_label_is_not_a_gpu(label: str) -> None:
    assert catalogue.gpu(label) is None


def test_every_device_is_plausible() -> None:
    for name in catalogue.gpu_names():
        d = catalogue.gpu(name)
        assert d is not None
        assert d.memory_nbytes is not None
        assert 3e12 < d.fp32_FLOPs <= d.conv_FLOPs < 3e15, name
        assert 10 * 2**30 < d.memory_nbytes < 400 * 2**30, name
        assert 2e11 < d.memory_bandwidth_Bps < 2e13, name
        assert d.host_bandwidth_Bps <= d.peer_bandwidth_Bps <= 1e12, name
        assert 0 < d.idle_power_W < d.peak_power_W / 3, name
        assert 0.1 < d.usd_per_h < 10, name
        assert d.source, name
        assert not d.assumed, name


def test_16_bit_peaks_are_those_without_sparsity() -> None:
    """Tensor cores do twice as many products of 16-bit numbers as of TF32. A peak with sparsity would be fourfold.

    Tensor cores of GeForce cards have half the rate with float32 sums, which for those with TF32 is twice that of FP32.
    """
    for name in catalogue.gpu_names():
        d = catalogue.gpu(name)
        assert d is not None
        assert d.bf16_FLOPs in (0, d.fp16_FLOPs), name
        if d.bf16_FLOPs and not name.startswith("mi"):
            assert d.fp16_FLOPs == pytest.approx(2 * d.conv_FLOPs, rel=0.03), name
        elif d.fp16_FLOPs:
            assert 3.9 < d.fp16_FLOPs / d.fp32_FLOPs < 8.1, name


def test_unknown_gpu_has_assumed_figures() -> None:
    d = catalogue.gpu_or_assumed("NVIDIA-X9000")
    assert d.assumed and not d.bf16_FLOPs and not d.fp16_FLOPs
    assert d.name == "NVIDIA-X9000"
    assert d.fp32_FLOPs == catalogue.gpu_or_assumed("t4").fp32_FLOPs


def test_mig_slice_has_a_fraction_of_the_gpu() -> None:
    label = "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"
    whole, part = catalogue.gpu("NVIDIA-A100-SXM4-40GB"), catalogue.gpu_or_assumed(label)
    assert whole is not None and part.assumed and part.name == label
    assert part.memory_nbytes == 19.5 * 2**30 and part.fp32_FLOPs == pytest.approx(3 / 7 * whole.fp32_FLOPs)
    assert catalogue.gpu_or_assumed("NVIDIA-X9000-MIG-1g.5gb").source.startswith("not in the catalogue")


@pytest.mark.parametrize(
    ("label", "stated", "gibibytes"),
    [
        ("Tesla-T4", None, 15 - 0.625),
        ("NVIDIA-L4", None, 23034 / 1024 - 0.625),
        ("NVIDIA-A100-SXM4-80GB", None, 80 - 0.625),
        ("NVIDIA-H100-80GB-HBM3", None, 81559 / 1024 - 0.625),
        ("AMD-Instinct-MI300X-OAM", None, 206141652992 / 2**30),
        ("NVIDIA-H200-MIG-1g.18gb", None, 16),
        ("Tesla-T4", "15109", 15109 / 1024 - 0.625),
        ("NVIDIA-X9000", "32768", 32 - 0.625),
        ("NVIDIA-X9000", None, 15 - 0.625),
        ("NVIDIA-L40S@250W", "46068", 46068 / 1024 - 0.625),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb@1200MHz", "4736", 4736 / 1024),
        *(("Tesla-T4", wrong, 15 - 0.625) for wrong in ("", "80", "80Gi", "-15360", "1.5e4", "9" * 30, "٣٤٥٦٧")),
    ],
)
def test_memory_that_processes_can_use(label: str, stated: str | None, gibibytes: float) -> None:
    """Regression: 16 GiB of a T4 counted, but PyTorch has 14.56."""
    labels = {} if stated is None else {catalogue.MEMORY_LABEL: stated}
    assert catalogue.gpu_nbytes(label, labels) == pytest.approx(gibibytes * 2**30, abs=1)


PYTORCH_GIB = {
    "t4": 14.56, "l4": 22.03, "a10": 22.03, "a100-sxm4-40gb": 39.38, "a40": 44.34, "l40s": 44.39,
    "h100-sxm5-80gb": 79.18, "b200-sxm-180gb": 178.35,
}  # fmt: skip
"""Least total capacity in messages of PyTorch (torch.cuda.OutOfMemoryError) in public logs."""


@pytest.mark.parametrize(("name", "most"), PYTORCH_GIB.items())
def test_memory_is_not_above_that_of_public_logs(name: str, most: float) -> None:
    device = catalogue.gpu(name)
    assert device is not None and device.memory_nbytes is not None
    assert 0.985 * most < device.memory_nbytes / 2**30 < most + 0.1


@pytest.mark.parametrize("name", catalogue.gpu_names())
def test_parts_are_no_larger_than_the_gpu(name: str) -> None:
    whole = catalogue.gpu(name)
    assert whole is not None and whole.memory_nbytes is not None
    for profile in catalogue.profiles(name):
        part = catalogue.gpu_or_assumed(f"{name}-MIG-{profile}")
        assert part.memory_nbytes is not None and 0.85 < part.memory_nbytes / (int(profile[3:-2]) * 2**30) <= 1
        assert part.memory_nbytes <= whole.memory_nbytes and catalogue.part_error(part.name) is None
        slices = 8 * part.memory_bandwidth_Bps / whole.memory_bandwidth_Bps
        assert slices in (1, 2, 4, 8), profile
        assert part.memory_nbytes <= slices / 8 * whole.memory_nbytes, profile


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "NVIDIA-A100-SXM4-40GB-MIG-9g.99gb",
            "a100-sxm4-40gb has no MIG profile 9g.99gb; expected one of 1g.5gb, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, "
            "7g.40gb. Correct the name, or set gpu: true",
        ),
        ("NVIDIA-A30-MIG-1g.5gb", "a30 has no MIG profile 1g.5gb; expected one of 1g.6gb, 2g.12gb, 4g.24gb."),
        ("NVIDIA-H200-MIG-3g.70gb", "h200-sxm-141gb has no MIG profile 3g.70gb; expected one of 1g.18gb"),
        ("Tesla-T4-MIG-1g.5gb", "t4 has no MIG profiles; expected the label of the whole GPU, such as Tesla-T4."),
    ],
)
def test_profile_that_the_gpu_lacks_is_an_error(device: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        cluster_view({"nodes": [{"device": device}]})
    assert str(error.value).startswith(f"cluster: nodes[0].device: found {device!r}, but {message}")
    (node,) = cluster_view({"nodes": [{"device": device, "gpu": True}]}).nodes
    assert node.is_gpu, "a profile of a newer driver"


@pytest.mark.parametrize("profile", ["1g.5gb", "1g.5gb.me", "1G.5GB", "3g.20gb"])
def test_profile_that_the_gpu_has_is_no_error(profile: str) -> None:
    assert cluster_view({"nodes": [{"device": f"NVIDIA-A100-SXM4-40GB-MIG-{profile}"}]}).nodes[0].is_gpu


def test_cpu_figures_scale_with_cores() -> None:
    one, half = catalogue.cpu("cpu", 1.0), catalogue.cpu("cpu", 0.5)
    assert half.fp32_FLOPs == one.fp32_FLOPs / 2
    assert half.memory_nbytes is None
    with pytest.raises(ValueError, match="device cpu: found 0 CPUs"):
        catalogue.cpu("cpu", 0)


@pytest.mark.parametrize(
    ("device", "near"),
    [
        ("NVIDIA-A100-SXM4-40G", "such as a100-sxm4-40gb"),
        ("A10O", "such as a10 "),
        ("h100x", "such as h100-sxm5-80gb"),
        ("RTX-9090", "rtx-3090"),
        ("Tesla-T40", "such as t4 or "),
        ("NVIDIA-X9000", "Correct the name, or set gpu: true"),
    ],
)
def test_unknown_gpu_is_no_cpu(device: str, near: str) -> None:
    """Fixed bug: a misspelt GPU was planned as a CPU."""
    with pytest.raises(ValueError, match=r"nodes\[0\].device: found") as error:
        cluster_view({"nodes": [{"device": device}]})
    assert near in str(error.value)
    for is_gpu in (False, True):
        assert cluster_view({"nodes": [{"device": device, "gpu": is_gpu}]}).nodes[0].is_gpu is is_gpu


@pytest.mark.parametrize(
    "device", ["cpu", "cpu-fast", "epyc-7763", "AMD-EPYC-9654", "xeon-6430", "a1", "c4", "m7i", "b"]
)
def test_names_of_cpus(device: str) -> None:
    assert not cluster_view({"nodes": [{"device": device}]}).nodes[0].is_gpu
    with pytest.raises(ValueError, match=r"with 2 devices, which is no GPU of the catalogue"):
        cluster_view({"nodes": [{"device": device, "devices": 2}]})


def test_part_of_a_gpu_needs_no_field_gpu() -> None:
    assert cluster_view({"nodes": [{"device": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "devices": 7}]}).nodes[0].is_gpu


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), (2, 2), (0.5, 0.5), ("500m", 0.5), ("4Gi", 4 * 2**30), ("1k", 1000), ("1.25G", 1.25e9)],
)
def test_quantity_is_parsed(text: object, value: float) -> None:
    assert float(quantity(text)) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1 Gi", "4gb", True, None, "1e3"])
def test_invalid_quantity_is_rejected(text: object) -> None:
    with pytest.raises(ValueError, match="expected a quantity"):
        quantity(text)


def test_cluster_file_is_parsed() -> None:
    view = cluster_view(
        {
            "nodes": [
                {"name": "gpu", "count": 2, "device": "NVIDIA-A100-SXM4-40GB", "devices": 8, "free": 6, "cpu": 64},
                {"device": "cpu-slow", "cpu": "200m", "memory": "2Gi", "bandwidth": "1.25G", "labels": {"zone": "a"}},
                {
                    "name": "x",
                    "device": "new-gpu",
                    "gpu": True,
                    "storage": "1Ti",
                    "taints": [{"key": "k", "effect": "NoSchedule"}],
                },
            ]
        }
    )
    a, b, slow, new = view.nodes
    assert (a.name, b.name, a.devices, a.free_devices, a.is_gpu, a.cpu) == ("gpu-0", "gpu-1", 8, 6, True, 64.0)
    assert (slow.name, slow.is_gpu, slow.cpu, slow.free_memory_nbytes) == ("node1", False, 0.2, 2**31)
    assert (slow.link_bandwidth_Bps, slow.labels) == (1.25e9, {"zone": "a"})
    assert (slow.storage_nbytes, new.storage_nbytes) == (None, 2**40)
    assert (new.is_gpu, new.taints) == (True, (("k", "", "NoSchedule"),))
    assert view.device_types == ("NVIDIA-A100-SXM4-40GB", "cpu-slow", "new-gpu")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "found list; expected a mapping with the single key nodes"),
        ({"machines": []}, "found machines; expected a mapping with the single key nodes"),
        ({"nodes": 3}, "nodes: found 3; expected a list of nodes"),
        ({"nodes": ["a"]}, "nodes[0]: found 'a'; expected a mapping"),
        ({"nodes": [{"name": [1]}]}, "nodes[0].name: found [1]; expected a name"),
        ({"nodes": [{"gpu": "no"}]}, "nodes[0].gpu: found 'no'; expected true or false"),
        ({"nodes": [{"cpus": 2}]}, "nodes[0].cpus: no such field; expected one of name, count"),
        ({"nodes": [{}, {"cpu": "two"}]}, "nodes[1].cpu: found 'two'; expected a quantity"),
        ({"nodes": [{"cpu": 0}]}, "nodes[0].cpu: found 0; expected a quantity above 0"),
        ({"nodes": [{"memory": -1}]}, "nodes[0].memory: found -1; expected bytes with a unit"),
        ({"nodes": [{"count": 0}]}, "nodes[0].count: found 0; expected a whole number from 1"),
        ({"nodes": [{"devices": 2}]}, "nodes[0].devices: found 2 without a device"),
        (
            {"nodes": [{"device": "Tesla-T4", "devices": 2, "free": 3}]},
            "nodes[0].free: found 3; expected a whole number from 0 to 2",
        ),
        ({"nodes": [{"device": 5}]}, "nodes[0].device: found 5"),
        ({"nodes": [{"labels": {"a": 1}}]}, "nodes[0].labels: found {'a': 1}"),
        ({"nodes": [{"taints": ["x"]}]}, "nodes[0].taints: found ['x']"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "two nodes named 'a'"),
        ({"nodes": [{"count": 60_000}, {"count": 60_000}]}, "more than 100000 nodes"),
    ],
)
def test_invalid_cluster_file_is_rejected(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match="cluster: ") as error:
        cluster_view(document)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "label, vendor",
    [
        ("NVIDIA-A100-SXM4-80GB", "nvidia"),
        ("Tesla_T4", "nvidia"),
        ("h100", "nvidia"),
        ("AMD_Instinct_MI100", "amd"),
        ("mi300x", "amd"),
        ("Radeon-RX-7900", "amd"),
    ],
)
def test_vendor_is_derived_from_the_label(label: str, vendor: str) -> None:
    assert catalogue.vendor(label) == vendor


@pytest.mark.parametrize(
    ("entry", "field", "message"),
    [
        (
            {"taints": [{"key": "a", "effect": "NoSchedule"}, {"key": "a", "effect": "noschedule"}]},
            "taints[1].effect",
            "found 'noschedule'; expected NoSchedule, PreferNoSchedule or NoExecute",
        ),
        ({"taints": [{"key": "a", "effect": "NoSchedule", "vaule": "b"}]}, "taints", "found ["),
        ({"device": "epyc", "gpu": False, "devices": 8}, "devices", "found 8 with gpu: false; expected 1, because"),
        ({"machineCpu": 4}, "machineCpu", "found 4 without a machine; expected also its name, such as machine: host-7"),
        ({"cpu": 0}, "cpu", "found 0; expected a quantity above 0, such as 2 or 500m. Correct it"),
        ({"zone": 1}, "zone", "found 1; expected text of at most 63 characters. Put a number in quotes"),
        (
            {"labels": {"a": 1}},
            "labels",
            "found {'a': 1}; expected a mapping of names to strings. Put numbers in quotes",
        ),
    ],
    ids=str,
)
def test_fields_of_nodes_that_would_have_no_effect_are_rejected(
    entry: dict[str, object], field: str, message: str
) -> None:
    """Regression: a misspelt effect left a tainted node in all plans, and a CPU node had one of its eight devices."""
    with pytest.raises(ValueError) as error:
        cluster_view({"nodes": [{}, entry]})
    assert str(error.value).startswith(f"cluster: nodes[1].{field}: {message}")


@pytest.mark.parametrize("part", ["NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"])
def test_parts_of_a_gpu_have_no_nvlink(part: str) -> None:
    """Regression: plans priced NVLink between the parts of GPUs, which copy through main memory."""
    found, whole = (catalogue.gpu_or_assumed(label) for label in (part, part.split("-MIG-")[0]))
    slices = int(part.split("-MIG-")[1][0])
    assert found.peer_bandwidth_Bps == pytest.approx(slices / 7 * whole.host_bandwidth_Bps)
