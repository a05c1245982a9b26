"""Leave implausible measurements out of plans: those that contradict data sheets, or the job's other measurements.

If a measured time is far from the estimate by the data sheet, either the measurement is wrong or the estimate. Where
dljob knows the structure of the model, the estimate counts as one piece of evidence. Each other device type on which
the model was measured is one, too: for the estimate if it agrees with the estimate, and for the measurement if it is
off by the same factor. Profiles of one device in several precisions, or with activation checkpointing, are not
independent, so they count once. CPUs are no evidence that a GPU is too slow, and GPUs none about CPUs. A measurement is
left out if there is more evidence for the estimate.

Where the user states the cost of the model, the estimate counts as none, because users mistake units. A measurement is
then left out only if at least two other device types contradict it and agree with each other. GPUs are compared with
GPUs, and CPUs with CPUs, because a script that launches many small kernels is slow on every GPU, but not on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from dlcontract import Precision
from dljob.calibrate.learned import Learned, LearnedPoint, hardware_of
from dljob.cluster import ClusterView, Node, catalogue
from dljob.cluster.hardware import Hardware
from dljob.cluster.machines import Machine, cores_of_machines, machines, smallest_cpu
from dljob.perf.fit.fitting import OUTLIER, agreeing
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.step.core_scaling import CoreUse
from dljob.perf.workload.workload import Workload, in_precision, recomputing
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.types import Request
from dljob.planner.types.request import PRECISIONS
from dljob.planner.types.texts import duration, rate, samples

FASTER = 8.0
"""Largest plausible ratio of estimated to measured time. Estimates assume at least a quarter of a GPU's peak, and CPU
cores in use are at most four times as fast as the catalogue's generic core. The rest is a margin."""
LAUNCH_BOUND = 4.0
"""Factor on ``FASTER`` for a stated cost. It is corrected by other devices, which may wait for launches of kernels."""
UNKNOWN_UNITS = 4.0
"""Factor on ``FASTER`` for 16-bit numbers on CPUs, which may have units for them that labels do not show."""
SLOWER = 20.0
"""Largest plausible ratio of measured to estimated time."""
FASTER_LINK = 2.0
"""Largest plausible ratio of a measured bandwidth between nodes to the one that their annotations state."""

Constants = Mapping[tuple[str, str], Learned]
Key = tuple[str, str]


@dataclass(frozen=True)
class _Profile:
    """A profile of the job's model, beside the estimates by the data sheet.

    ``ratios``: log(measured / estimated seconds) of each point. ``faster``: the largest plausible ratio of estimated to
    measured time. ``estimate``: function from a point to its estimated (shortest, longest) seconds. ``shift``: log of
    the factor by which measurements on several devices correct a stated cost; it is subtracted from ``ratios``.
    """

    known: Learned
    is_gpu: bool
    ratios: tuple[float, ...]
    faster: float
    estimate: Callable[[LearnedPoint], tuple[float, float]]
    shift: float = 0.0

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def plausible(self, ratio: float) -> bool:
        return -log(self.faster) <= ratio <= log(SLOWER)

    def without_others(self, known: Learned) -> "_Profile":
        """Return the profile with only the points of ``known``."""
        pairs = zip(self.known.points, self.ratios, strict=True)
        return replace(self, known=known, ratios=tuple(ratio for point, ratio in pairs if point in known.points))

    def shifted(self, by: float) -> "_Profile":
        return replace(self, ratios=tuple(ratio - by for ratio in self.ratios), shift=by)


def without_implausible(request: Request, view: ClusterView, learned: Constants) -> Constants:
    """Return ``learned`` without implausible measurements of the job's model, which ``Learned.doubts`` then lists.

    ``learned``: measured constants by (``request.key``, device). If all compute times of a profile are implausible,
    nothing of it remains but its gradient noise scale.
    """
    names = request.keys
    own = {key: found for key, found in learned.items() if key[0] in names and (found.points or found.steps)}
    try:
        workload = workload_of(request)
    except ValueError:
        return learned
    if not own:
        return learned
    nodes = {node.device: node for node in view.nodes}
    cores = cores_of_machines(view.nodes)
    shared = {name: machines([n for n in view.nodes if n.device == name], cores) for _, name in own}
    typed = {request.key(p, again): _variant(workload, p, again) for p in PRECISIONS for again in (False, True)}
    agreed: dict[Key, Learned] = {}
    profiles: dict[Key, _Profile] = {}
    for key, found in own.items():
        profile = _beside_estimate(found, key[1], typed[key[0]], request, nodes, shared[key[1]], learned)
        agreed[key] = left = _agreeing(found, profile)
        if profile is not None:
            profiles[key] = profile.without_others(left)
    stated = request.model is None
    if stated:
        profiles = _corrected(profiles)
    changed = {key: _judged(key, found, profiles, stated) for key, found in agreed.items()}
    return {**learned, **{key: _plausible_link(found, nodes.get(key[1])) for key, found in changed.items()}}


def _corrected(profiles: Mapping[Key, _Profile]) -> dict[Key, _Profile]:
    """Return profiles beside a stated cost that the GPU types, or the CPU types, correct if they are more than two."""
    changed = dict(profiles)
    for is_gpu in (True, False):
        alike = {key: each for key, each in profiles.items() if each.is_gpu == is_gpu}
        devices = dict.fromkeys(device for _, device in alike)
        ratios = [median(each.ratio for (_, name), each in alike.items() if name == device) for device in devices]
        if len(ratios) > 2:
            changed |= {key: each.shifted(median(ratios)) for key, each in alike.items()}
    return changed


def _variant(workload: Workload, precision: Precision, again: bool) -> Workload:
    typed = in_precision(workload, precision)
    return recomputing(typed) if again and typed.checkpointed_nbytes is not None else typed


def _agreeing(known: Learned, profile: _Profile | None) -> Learned:
    """Return a profile without points that disagree with most other points of the same layout.

    If at most half of them agree with most others, those near the point nearest to the estimate remain. Without an
    estimate (``profile`` is None), none of them does. If no point remains, the steps and the link go, too.
    """
    left: list[LearnedPoint] = []
    for kind in dict.fromkeys((p.cores, p.ranks, p.machine_nodes) for p in known.points):
        same = [p for p in known.points if (p.cores, p.ranks, p.machine_nodes) == kind]
        agrees = agreeing([(p.batch, p.compute_s) for p in same])
        if 2 * sum(agrees) <= len(same):
            ratios = dict(zip(known.points, profile.ratios, strict=True)) if profile else {}
            best = min((ratios[p] for p in same if p in ratios), key=abs, default=0.0)
            agrees = [p in ratios and _agree(ratios[p], best) for p in same]
        left += [p for p, counts in zip(same, agrees, strict=True) if counts]
    if len(left) == len(known.points):
        return known
    batches = ", ".join(str(p.batch) for p in known.points if p not in left)
    text = f"found times for the batch sizes {batches} that differ from the others by more than a factor of {OUTLIER:g}"
    if not left:
        return _nothing_of(known, text)
    return replace(known, points=tuple(p for p in known.points if p in left), doubts=(text,))


def _nothing_of(known: Learned, text: str) -> Learned:
    """Return only the noise scale of a profile. Fits to wrong times would make predictions look more certain."""
    return Learned(noise=known.noise, hardware=known.hardware, doubts=(*known.doubts, text))


def _beside_estimate(
    known: Learned,
    device: str,
    workload: Workload,
    request: Request,
    nodes: Mapping[str, Node],
    shared: Sequence[Machine],
    learned: Constants,
) -> _Profile | None:
    """Return a profile beside the estimates for its points; None if there is no data sheet, or if it has no points.

    ``shared``: machines of the nodes with this type of device.
    """
    hardware, node = hardware_of(device, learned), nodes.get(device)
    sheet = catalogue.gpu_or_assumed(device)
    is_gpu = node.is_gpu if node else catalogue.gpu(device) is not None
    unknown = is_gpu and sheet.assumed and not catalogue.is_part(device)
    unseen = not is_gpu and node is None and all(point.cores is None for point in known.points)
    if not known.points or unknown or unseen:
        return None

    def seconds(cores: float, point: LearnedPoint, probed: Hardware | None) -> float:
        chip = sheet if is_gpu else catalogue.cpu(device, cores)
        chip = chip if probed is None else probed.device(chip, cores)
        use = None if is_gpu else CoreUse(cores, point.ranks, max(cores * point.ranks, node.cpu if node else 0.0))
        return catalogue_curve(workload, chip, cores, use).seconds(point.batch)

    def estimate(point: LearnedPoint) -> tuple[float, float]:
        # A profile that does not state the cores of a rank allows for all cores of the node. One core may be a part.
        most, asked = (node.cpu if node else 1.0), request.cpu_per_pod or 1.0
        low, high = min(1.0, most, asked), max(1.0, most, asked)
        if point.cores is not None:
            low, high = (low if point.cores == 1 else float(point.cores)), float(point.cores)
        if point.machine_nodes > 1:  # Without labels, a machine counts as large as a node. Some nodes may have waited.
            machine_cpu = smallest_cpu(shared, point.machine_nodes) if shared else most
            low = min(low, machine_cpu / (point.machine_nodes * point.ranks))
        # A probe may have run on a busy node, so that measurements of the model count more than the probe.
        found = [seconds(cores, point, probed) for cores in (low, high) for probed in {None, hardware}]
        return min(found), max(found)

    ratios = []
    for point in known.points:
        low_s, high_s = estimate(point)
        ratios.append(log(point.compute_s / max(low_s, min(point.compute_s, high_s))))
    faster = FASTER * (UNKNOWN_UNITS if not is_gpu and workload.precision != "FP32" else 1.0)
    faster *= LAUNCH_BOUND if request.model is None else 1.0
    return _Profile(known, is_gpu, tuple(ratios), faster, estimate)


def _judged(key: Key, known: Learned, profiles: Mapping[Key, _Profile], stated: bool) -> Learned:
    """Return a profile without the points, and without the steps on several devices, that are implausible.

    ``stated``: True if the user states the cost of the model.
    """
    profile = profiles.get(key)
    if profile is None:
        return known
    pairs = list(zip(known.points, profile.ratios, strict=True))
    wrong = [
        point
        for point, ratio in pairs
        if not profile.plausible(ratio) and _contradicted(key, profile, ratio, profiles, stated)
    ]
    if not wrong:
        return known
    low_s, high_s = (exp(profile.shift) * each for each in profile.estimate(wrong[0]))
    text = (
        f"found {duration(wrong[0].compute_s)} for a step of {samples(wrong[0].batch)}; expected "
        f"{duration(low_s / profile.faster)} to {duration(high_s * SLOWER)}, because the estimate is "
        + " to ".join(dict.fromkeys((duration(low_s), duration(high_s))))
    )
    if len(wrong) == len(pairs):
        return _nothing_of(known, text)
    left = tuple(point for point in known.points if point not in wrong)
    return replace(known, points=left, doubts=(*known.doubts, text))


def _contradicted(key: Key, profile: _Profile, ratio: float, profiles: Mapping[Key, _Profile], stated: bool) -> bool:
    """Return True if there is more evidence for the estimate than for a measurement that is off by exp(``ratio``).

    The evidence of another device type is its profile of the same variant of the model. If there is none, it is the
    profile that agrees best with the measurement.
    """
    devices: dict[str, tuple[bool, float, _Profile]] = {}
    for (name, device), each in profiles.items():
        if device != key[1]:
            found = (name != key[0], abs(each.ratio - ratio), each)
            devices[device] = min(devices.get(device, found), found, key=lambda each: each[:2])
    others = [each for _, _, each in devices.values()]
    alike = [each for each in others if each.is_gpu == profile.is_gpu]
    slow = ratio > 0
    for_estimate = [each.ratio for each in (alike if stated or slow else others) if profile.plausible(each.ratio)]
    for_measurement = sum(_agree(each.ratio, ratio) for each in (alike if stated else others))
    if stated:
        together = max((sum(_agree(a, b) for b in for_estimate) for a in for_estimate), default=0)
        return together > max(1, for_measurement)
    return 1 + len(for_estimate) > for_measurement


def _agree(ratio: float, other: float) -> bool:
    return abs(ratio - other) <= log(OUTLIER)


def _plausible_link(known: Learned, node: Node | None) -> Learned:
    """Return a profile without its link if that is faster than the network that the annotation of ``node`` states.

    A profile of an older release may store the shared memory of one node as its link. If no run on several nodes is
    stored, the text names this possibility.
    """
    stated = node.link_bandwidth_Bps if node else None
    if stated is None or known.link_bandwidth_Bps is None or known.link_bandwidth_Bps <= FASTER_LINK * stated:
        return known
    found, most = rate(known.link_bandwidth_Bps), rate(FASTER_LINK * stated)
    alone = "No stored run used several nodes, so it may be the shared memory of one node. "
    text = (
        f"found {found} between nodes; expected at most {most}, {FASTER_LINK:g} times the bandwidth in the nodes' "
        f"annotation dljob.dev/network-bandwidth. {'' if any(step.place.nodes > 1 for step in known.steps) else alone}"
        "If the annotation is wrong, correct it"
    )
    doubts = (*known.doubts, text)
    return replace(known, link_latency_s=None, link_bandwidth_Bps=None, link_spread=None, doubts=doubts)
