"""Compare the model with published figures: a layered parameter server beside a ring, and large transformers on A100s.

    python -m benchmarks.perfmodel.literature [--alpha-us 1] [--bandwidth-GBps 14] [--reduce-GBps 50] [--message-us 0]
        [--json]

``large_models`` has the second table, with its sources: steps of GPT and Llama with FSDP and tensor parallelism.

The first one compares a layered parameter server with one ring on 2 to 512 nodes. The server is rank 0. It broadcasts
the parameters (W bytes) and gathers each of L learnable tensors, so that
T_server = T_broadcast(W) + sum over tensors (T_gather(v, n) + sync) + T_update. The ring all-reduces one contiguous
buffer. Published (Caffe on the Sunway TaihuLight, 2020; links of 14 GB/s): the server takes 10 times the ring's time
for AlexNet on 256 nodes, 77 times for GoogLeNet and 98 times for ResNet (its depth is not given, ResNet-50 here) on 32
nodes, and the two differ little below 16, 8 and 8 nodes. The trainer's gather is Serial; Tree is a binomial tree.

Three sets of constants are shown. "as stated" fits nothing. "latency only" is the limit in which messages cost latency
and bytes cost nothing: a serial gather then takes L / 2 times the ring's time, whatever the constants. "best single
set" minimizes the worst of the three misses over the grid of ``search``. A miss is predicted / published.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil, inf, log, log2
from typing import NamedTuple, get_args

from benchmarks.perfmodel import large_models
from benchmarks.perfmodel.gradient_layouts import LAYOUTS

from dljob.perf.step.communication import Gather, Link, butterfly_s, layered_server_s, ring_s
from dljob.perf.workload.workload import REAL_NBYTES

NODES = tuple(2**k for k in range(1, 10))


class Point(NamedTuple):
    """A published ratio of the server's communication time to the ring's."""

    nodes: int
    ratio: float
    similar_below: int
    """The two ways differ little on fewer nodes than this."""


PUBLISHED: Mapping[str, Point] = {
    "AlexNet": Point(256, 10, 16), "GoogLeNet": Point(32, 77, 8), "ResNet-50": Point(32, 98, 8),
}  # fmt: skip
DEFAULT_OVER_RING = (2.3, 4.1)
"""Published: time of ``MPI_Allreduce`` divided by that of the ring, on 512 nodes (figures 7 and 8)."""
FIGURE_7_NBYTES = (60.97e6, 243.9e6)
"""The size in figure 7 is 60.97 MB. AlexNet has 60.97 million parameters, which take 243.9 MB in single precision."""
SIMILAR = 1.5


@dataclass(frozen=True)
class Constants:
    """Constants of the model. ``message_s``: seconds of the server for each message, besides its latency.

    ``update_Bps``: bytes of parameters that the server updates per second, which the ring's ranks need too.
    """

    alpha_s: float = 1e-6
    bandwidth_Bps: float = 14e9
    reduce_Bps: float = 50e9
    message_s: float = 0.0
    update_Bps: float = 20e9

    @property
    def link(self) -> Link:
        return Link(self.alpha_s, self.bandwidth_Bps, self.reduce_Bps, "assumed")


@dataclass(frozen=True)
class Times:
    """Seconds of one step's communication (and the server's update), by the model."""

    broadcast_s: float
    gather_s: float
    update_s: float
    ring_s: float

    @property
    def server_s(self) -> float:
        return self.broadcast_s + self.gather_s + self.update_s

    @property
    def ratio(self) -> float:
        return self.server_s / self.ring_s


def times(sizes: tuple[int, ...], nodes: int, given: Constants, gather: Gather = "Serial") -> Times:
    """Return the times for tensors of ``sizes`` elements on ``nodes`` nodes.

    The update of all ranks at the ring's end takes as long as the server's, and is not communication. So the server's
    is counted only where all others wait for it.
    """
    nbytes = float(REAL_NBYTES * sum(sizes))
    gathering_s, broadcast_s = layered_server_s(nbytes, nodes, given.link, len(sizes), gather, given.message_s)
    return Times(
        float(broadcast_s), float(gathering_s), nbytes / given.update_Bps, float(ring_s(nbytes, nodes, given.link))
    )


def latency_only(tensors: int, nodes: int, gather: Gather = "Serial") -> float:
    """Return the ratio in the limit in which bytes cost nothing: L m alpha / (2 (n-1) alpha), without synchronization.

    The server handles m messages for each of L tensors: n - 1 (Serial) or ceil(log2 n) (Tree).
    """
    messages = nodes - 1 if gather == "Serial" else ceil(log2(nodes))
    return tensors * messages / (2 * (nodes - 1))


def leaves_similar(name: str, given: Constants, gather: Gather) -> int | None:
    """Return the smallest number of nodes, from 2 to 512, with a ratio outside 1 to 1.5; None if there is none."""
    for nodes in range(2, 513):
        if not 1 <= times(LAYOUTS[name], nodes, given, gather).ratio <= SIMILAR:
            return nodes
    return None


def misses(given: Constants, gather: Gather) -> dict[str, float]:
    """Return predicted / published ratio for each of the three points."""
    return {name: times(LAYOUTS[name], at.nodes, given, gather).ratio / at.ratio for name, at in PUBLISHED.items()}


def worst(found: Mapping[str, float]) -> float:
    """Return the largest factor by which a prediction is off, in either direction."""
    return max(max(miss, 1 / miss) for miss in found.values())


def search(gather: Gather) -> Constants:
    """Return the constants of the grid with the smallest worst miss, at links of 14 GB/s.

    alpha: 0.1 us to 10 ms; message: 0, or 0.1 us to 10 ms; reduction: 1 to 50 GB/s.
    """
    decades = [10 ** (-7 + step / 4) for step in range(21)]
    grid: Iterator[tuple[float, float, float]] = product(decades, [0.0, *decades], [1e9, 5e9, 14e9, 50e9])
    best, least = Constants(), inf
    for alpha_s, message_s, reduce_Bps in grid:
        given = Constants(alpha_s, reduce_Bps=reduce_Bps, message_s=message_s)
        if (off := max(abs(log(miss)) for miss in misses(given, gather).values())) < least:
            best, least = given, off
    return best


def default_over_ring(nbytes: float, given: Constants, nodes: int = 512) -> float:
    """Return the time of recursive doubling, the fallback of MPI libraries, divided by that of the ring."""
    return float(butterfly_s(nbytes, nodes, given.link) / ring_s(nbytes, nodes, given.link))


def report(given: Constants) -> dict[str, object]:
    """Return all figures: ratios by nodes, the three points with each set of constants, and where they differ."""
    sets: dict[str, tuple[Constants, Gather]] = {}
    for gather in get_args(Gather):
        sets[f"as stated, {gather}"] = given, gather
        sets[f"best single set, {gather}"] = search(gather), gather
    found: dict[str, object] = {
        name: {
            "constants": asdict(constants),
            "ratios": {
                model: [times(sizes, n, constants, gather).ratio for n in NODES] for model, sizes in LAYOUTS.items()
            },
            "misses": misses(constants, gather),
            "leaves": {model: leaves_similar(model, constants, gather) for model in LAYOUTS},
        }
        for name, (constants, gather) in sets.items()
    }
    found["latency only, Serial"] = {
        model: latency_only(len(LAYOUTS[model]), at.nodes) / at.ratio for model, at in PUBLISHED.items()
    }
    found["large models"] = large_models.report()
    found["default / ring"] = {f"{nbytes:g}": default_over_ring(nbytes, given) for nbytes in FIGURE_7_NBYTES}
    return found


def show(given: Constants) -> None:
    for gather in get_args(Gather):
        for title, constants in (("as stated", given), ("best single set", search(gather))):
            off = misses(constants, gather)
            print(
                f"\n{title}, gather {gather}: alpha {1e6 * constants.alpha_s:.3g} us, message "
                f"{1e6 * constants.message_s:.3g} us, {constants.bandwidth_Bps / 1e9:g} GB/s, reduction "
                f"{constants.reduce_Bps / 1e9:g} GB/s; worst miss {worst(off):.2f}x"
            )
            print(f"{'server / ring on nodes':>24}" + "".join(f"{n:>8}" for n in NODES))
            for model, sizes in LAYOUTS.items():
                row = [times(sizes, n, constants, gather).ratio for n in NODES]
                print(f"{model:>24}" + "".join(f"{ratio:8.1f}" for ratio in row))
            for model, at in PUBLISHED.items():
                left = leaves_similar(model, constants, gather)
                print(
                    f"  {model} on {at.nodes} nodes: published {at.ratio:g}, predicted {at.ratio * off[model]:.1f} "
                    f"({off[model]:.2f} of it); leaves 1 to {SIMILAR:g} at {left or '>512'} nodes (published: from "
                    f"{at.similar_below})"
                )
    print("\nlatency only, gather Serial (L / 2, no constants):")
    for model, at in PUBLISHED.items():
        limit = latency_only(len(LAYOUTS[model]), at.nodes)
        print(f"  {model}, {len(LAYOUTS[model])} tensors: published {at.ratio:g}, predicted {limit:g} "
              f"({limit / at.ratio:.2f} of it; published / tensors {at.ratio / len(LAYOUTS[model]):.2f})")  # fmt: skip
    low, high = DEFAULT_OVER_RING
    print(f"\nMPI_Allreduce / ring on 512 nodes: published {low} to {high}; recursive doubling, predicted:")
    for nbytes in FIGURE_7_NBYTES:
        print(f"  {nbytes / 1e6:.4g} MB: {default_over_ring(nbytes, given):.1f}")
    large_models.show()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha-us", type=float, default=1.0, help="latency of a message (assumed)")
    parser.add_argument("--bandwidth-GBps", type=float, default=14.0, help="as published")
    parser.add_argument("--reduce-GBps", type=float, default=50.0, help="speed of adding buffers (assumed)")
    parser.add_argument("--message-us", type=float, default=0.0, help="further time of the server for each message")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    values = (options.alpha_us, options.bandwidth_GBps, options.reduce_GBps, options.message_us)
    if not all(0 <= value < inf for value in values) or not all(value > 0 for value in values[:3]):
        parser.error(
            f"found --alpha-us {values[0]:g}, --bandwidth-GBps {values[1]:g}, --reduce-GBps {values[2]:g} and "
            f"--message-us {values[3]:g}; expected finite numbers above 0 (--message-us: 0 or more)"
        )
    given = Constants(1e-6 * values[0], 1e9 * values[1], 1e9 * values[2], 1e-6 * values[3])
    if options.json:
        print(json.dumps(report(given)))
    else:
        show(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
