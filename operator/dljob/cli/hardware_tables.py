"""Format measured hardware as a table beside the data sheet. The module does no I/O."""

from dljob.api.profiles.profile import HardwareProfile, ProbedLink, ProbedRanks, RefittedRegression
from dljob.cli.tables import table
from dljob.cluster.catalogue import Device
from dljob.cluster.hardware import Hardware
from dljob.job.probes.hardware import sheet_of
from dljob.perf.resources.power import slowed
from dljob.perf.step import communication, input_data
from dljob.perf.step.compute import ARITHMETIC_EFFICIENCY, BANDWIDTH_EFFICIENCY, TENSOR_EFFICIENCY
from dljob.perf.workload import structure

HEADER = ["", "DATA SHEET", "MEASURED", "RATIO"]


def hardware_table(device: str, profile: HardwareProfile, hardware: Hardware) -> list[str]:
    """Return lines with a table that compares the measured hardware of a device type with its data sheet.

    Below the table are notes about what was not measured, and warnings about implausible values. Rates of computing are
    those that plans expect, not peaks. ``hardware``: the planner's constants of ``profile``.
    """
    sheet, factors = slowed(sheet_of(device, profile.kind)), hardware.factors
    per = "of the GPU" if profile.kind == "gpu" else "of a core"
    product, convolution, traffic = _sheet_rates(sheet)
    rows = [
        _row(f"matrix products {per}", product, product / factors.product, "FLOP/s"),
        _row(f"convolutions {per}", convolution, convolution / factors.convolution, "FLOP/s"),
        _row(f"activations {per}", traffic, traffic / factors.activation, "B/s"),
        _row(f"parameters {per}", traffic, traffic / factors.weight, "B/s"),
    ]
    overhead_s = structure.HOST_S["step"] + 10 * structure.HOST_S["layer"]
    rows.append(_row("overhead of 10 layers", overhead_s, overhead_s * factors.host, "s"))
    if profile.kind == "gpu":
        rows.append(["16-bit products", "", "", f"{1 / factors.half:.2f}"])
    rows += _optional_rows(profile, hardware, sheet)
    where = f" on {profile.node}" if profile.node else ""
    lines = [f"{device}: {profile.product}, {profile.cores:g} of {profile.node_cores} CPUs{where}"]
    lines += [f"  {line}" for line in table(HEADER, rows)]
    lines += _regression_lines(profile.regression) if profile.regression else []
    lines += [f"  Note:    {note}" for note in profile.notes]
    lines += [f"  Warning: {doubt}" for doubt in hardware.doubts]
    return lines


def link_table(ends: tuple[str, str], nodes: tuple[str, str], link: ProbedLink) -> list[str]:
    """Return lines with a measured link between two nodes, beside what plans assume without a measurement.

    ``ends``, ``nodes``: device types and names of the two nodes.
    """
    far = communication.ETHERNET_BANDWIDTH_Bps, communication.TCP_LATENCY_S
    types = " and ".join(dict.fromkeys(ends))
    title = f"network between nodes of {types}: {nodes[0]} and {nodes[1]}"
    return [title, *(f"  {line}" for line in table(HEADER, _link_rows("between nodes", link, *far)))]


def _regression_lines(regression: RefittedRegression) -> list[str]:
    """Return lines with the median errors of the regression before and after the refit, and what plans use."""
    rows = [
        _error_row("step time", regression.time_error_before, regression.time_error, bool(regression.time_factors)),
        _error_row("memory", regression.memory_error_before, regression.memory_error, bool(regression.memory_factors)),
    ]
    title = f"median error on unseen networks, of {regression.networks}"
    lines = table([title, "BEFORE", "REFITTED", "PLANS USE"], rows)
    if regression.on_ranks:
        lines += [
            "",
            *table(["ranks of a node", "NETWORKS", "ERROR", "POWER"], list(map(_ranks_row, regression.on_ranks))),
        ]
    return ["", *(f"  {line}".rstrip() for line in lines)]


def _ranks_row(row: ProbedRanks) -> list[str]:
    error = "" if row.error is None else f"{row.error:.1%}"
    power = "not measured" if row.watts is None else f"{row.watts:.3g} W"
    return [f"{row.ranks}", f"{row.networks}", error, power]


def _error_row(name: str, before: float | None, after: float | None, used: bool) -> list[str]:
    figures = ["" if value is None else f"{value:.1%}" for value in (before, after)]
    return [name, *figures, "the refit" if used else "the former one"]


def _sheet_rates(sheet: Device) -> tuple[float, float, float]:
    """Return the (products, convolutions, memory traffic) per second that plans expect by the data sheet."""
    if sheet.kind == "cpu":
        return (
            1 / structure.TIME_S["product_FLOP"],
            1 / structure.TIME_S["convolution_FLOP"],
            sheet.memory_bandwidth_Bps,
        )
    has_units = sheet.conv_FLOPs > sheet.fp32_FLOPs
    conv = sheet.conv_FLOPs * (TENSOR_EFFICIENCY if has_units else ARITHMETIC_EFFICIENCY["gpu"])
    return sheet.fp32_FLOPs * ARITHMETIC_EFFICIENCY["gpu"], conv, sheet.memory_bandwidth_Bps * BANDWIDTH_EFFICIENCY


def _optional_rows(profile: HardwareProfile, hardware: Hardware, sheet: Device) -> list[list[str]]:
    rows = []
    if hardware.memory_Bps is not None:
        rows.append(_row("copies in memory", sheet.memory_bandwidth_Bps, hardware.memory_Bps, "B/s"))
    if hardware.disk_Bps is not None:
        rows.append(_row("disk, reading", input_data.DISK_BANDWIDTH_Bps, hardware.disk_Bps, "B/s"))
    if profile.disk_write_bytes_per_second is not None:
        rows.append(["disk, writing", "", _figure(profile.disk_write_bytes_per_second, "B/s"), ""])
    if profile.background_cores is not None:
        rows.append(["CPUs that others use", "", f"{profile.background_cores:.2g}", ""])
    near = sheet.peer_bandwidth_Bps, communication.SHARED_MEMORY_LATENCY_S
    far = communication.ETHERNET_BANDWIDTH_Bps, communication.TCP_LATENCY_S
    rows += _link_rows("within the node", profile.node_link, *near) if hardware.near else []
    rows += _link_rows("between nodes", profile.network_link, *far) if hardware.far else []
    return rows


def _link_rows(where: str, link: ProbedLink | None, bandwidth_Bps: float, latency_s: float) -> list[list[str]]:
    assert link is not None, "the bounded constants have the link, so the profile has it"
    return [
        _row(f"link {where}", bandwidth_Bps, link.bandwidth_bytes_per_second, "B/s"),
        _row(f"latency {where}", latency_s, link.latency_seconds, "s"),
    ]


def _row(name: str, sheet: float, measured: float, unit: str) -> list[str]:
    return [name, _figure(sheet, unit), _figure(measured, unit), f"{measured / sheet:.2f}"]


def _figure(value: float, unit: str) -> str:
    """Return a value with three digits and a decimal prefix, such as ``1.25 GB/s`` or ``60 us``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}"
