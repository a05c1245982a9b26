"""Measure the constants of frameworks that ``dljob plan --compare frameworks`` uses, and check them.

    python -m benchmarks.papers.framework_constants [--ranks 2 3 4] [--rates 10 20] [--rounds 7] [--write FILE]

Each backend reduces the same buffers over the same links, in turns, in the same processes: dltrain's all-reduces over
MPI, gloo (torch.distributed) and dltrain's synchronous parameter server. So does an exchange of messages between
neighbours, as in dltrain's probe, whose latency is that of the link. Links are those between network namespaces (needs
root), whose rate is the bandwidth, and the memory of one machine with 2 ranks, whose bandwidth is that of the exchange.
For each backend, two ratios are fitted to the logarithms of the times:

    latency     latency per message of the backend / that of the link
    bandwidth   bandwidth of the backend / that of the link

Within a machine, both are then divided by those of MPI: there, an exchange of large messages between processes that
share busy processors says little about a link. The planner's assumption for links within a node then is that of MPI.

The times follow the formulas of ``dljob.perf.step.communication``. The fastest of all rounds counts, because other work
on the machine only slows an all-reduce down. Ratios, not times, are stored, because such work slows down all backends.
The spread is the standard deviation of log(measured / predicted) for buffers of 64 KiB or more, with ratios that were
fitted without the number of ranks that is predicted (within a machine, where there is one number: without the buffer).

``--write`` stores the constants, with the machine and the date, in the file that the planner reads:
operator/dljob/perf/step/backends.json.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib import namespaces
from benchmarks.lib.figures import machine
from benchmarks.training.allreduce import Case, run
from benchmarks.training.ranks.allreduce import BUTTERFLY, EXCHANGE, GLOO, HALVING, RING, SERVER, STRATEGIES
from scipy.optimize import least_squares

from dljob.perf.step.communication import Link, allreduce_s
from dljob.perf.step.step import BUCKET_NBYTES

SIZES = [2**8, 2**16, 2**19, 2**21]
SIZES_WITHIN = [2**8, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24]
SPREAD_FROM = 2**16
"""Smallest buffer whose error counts for the spread: buckets of gradients are larger."""
REDUCE_BPS = 4e9
"""Bytes per second that a rank adds: the planner's assumption for a CPU."""
WAYS = {"MPI": (RING, HALVING, BUTTERFLY), "Gloo": (GLOO,), "ParameterServer": (SERVER,)}
"""Way to reduce gradients → candidates of ``allreduce_ranks`` that use it."""
DDP_BUCKET_NBYTES = 25 * 2**20
"""Default of DistributedDataParallel's ``bucket_cap_mb``."""


@dataclass(frozen=True)
class Point:
    """A measured all-reduce, and the link on which it was measured."""

    candidate: str
    ranks: int
    nbytes: int
    seconds: float
    latency_s: float
    bandwidth_Bps: float

    def predicted_s(self, latency: float = 1.0, bandwidth: float = 1.0) -> float:
        """Return the predicted seconds if the link had these ratios of its latency and bandwidth."""
        link = Link(latency * self.latency_s, bandwidth * self.bandwidth_Bps, REDUCE_BPS)
        name: Any = STRATEGIES[self.candidate]
        return float(allreduce_s(name, float(self.nbytes), float(self.ranks), link))


def points(case: Case, rounds: int) -> list[Point]:
    """Run all candidates and return the time of the fastest round of each, with the link as the exchange saw it.

    Two ranks run no halving-doubling, which is then a ring.
    """
    names = [n for ways in WAYS.values() for n in ways if case.ranks > 2 or n != HALVING]
    found = run(case, rounds, [EXCHANGE, *names])
    latency_s, bandwidth_Bps = link_of([(row["nbytes"], min(row["seconds"][EXCHANGE])) for row in found])
    bandwidth_Bps = bandwidth_Bps if case.rate_Bps is None else case.rate_Bps * 1448 / 1538  # without TCP's headers
    return [
        Point(name, case.ranks, row["nbytes"], min(row["seconds"][name]), latency_s, bandwidth_Bps)
        for row in found
        for name in names
    ]


def link_of(exchanged: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency and the bandwidth of a link, from (bytes, seconds) of exchanges with rising numbers of bytes.

    The smallest exchange gives the latency. The bandwidth has the least squares of log(seconds / predicted).
    """
    latency_s, sizes = exchanged[0][1], exchanged[1:]
    large, long_s = sizes[-1]

    def errors(x: Any) -> list[float]:
        return [log(seconds / (latency_s + nbytes * exp(x[0]))) for nbytes, seconds in sizes]

    best = least_squares(errors, [log(max(long_s - latency_s, long_s / 2) / large)]).x
    return latency_s, exp(-best[0])


def fitted(found: Sequence[Point]) -> tuple[float, float]:
    """Return the ratios (latency, bandwidth) with the least squares of log(measured / predicted)."""

    def errors(x: Any) -> list[float]:
        return [log(p.seconds / p.predicted_s(exp(x[0]), exp(x[1]))) for p in found]

    best = least_squares(errors, [0.0, 0.0], bounds=([log(0.05), log(0.05)], [log(100), log(20)]))
    return exp(best.x[0]), exp(best.x[1])


def spread(found: Sequence[Point]) -> float:
    """Return the root mean square of log(measured / predicted) for points that the constants were not fitted to."""
    by_ranks = len({p.ranks for p in found}) > 1
    errors = []
    for left_out in sorted({(p.ranks if by_ranks else p.nbytes) for p in found}):
        kept = [p for p in found if (p.ranks if by_ranks else p.nbytes) != left_out]
        ratios = fitted(kept)
        errors += [log(p.seconds / p.predicted_s(*ratios)) for p in found if p not in kept and p.nbytes >= SPREAD_FROM]
    return float(np.sqrt(np.mean(np.square(errors))))


def constants(found: Iterable[Point]) -> dict[str, dict[str, float]]:
    """Return latency ratio, bandwidth ratio and spread of each way."""
    every, result = list(found), {}
    for way, names in WAYS.items():
        own = [p for p in every if p.candidate in names]
        latency, bandwidth = fitted(own)
        result[way] = {"latency": latency, "bandwidth": bandwidth, "spread": spread(own), "points": len(own)}
    return result


def relative(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the constants with latency and bandwidth divided by those of MPI."""
    own = found["MPI"]
    return {
        way: row | {"latency": row["latency"] / own["latency"], "bandwidth": row["bandwidth"] / own["bandwidth"]}
        for way, row in found.items()
    }


def show(where: str, found: Sequence[Point], fits: dict[str, dict[str, float]]) -> None:
    """Print the constants, and each measured time divided by the time that they predict."""
    print(
        f"\n## {where}\n\n| backend | latency / link's | bandwidth / link's | spread | points |\n|---|---|---|---|---|"
    )
    for way, row in fits.items():
        print(f"| {way} | {row['latency']:.2f} | {row['bandwidth']:.2f} | {row['spread']:.2f} | {row['points']} |")
    print("\n| ranks | KiB | " + " | ".join(n for ways in WAYS.values() for n in ways) + " |")
    print("|---|---|" + "---|" * sum(map(len, WAYS.values())))
    for key in sorted({(p.ranks, p.nbytes, p.latency_s, p.bandwidth_Bps) for p in found}):
        cells = []
        for way, names in WAYS.items():
            for name in names:
                own = [p for p in found if p.candidate == name and key == (p.ranks, p.nbytes, *_link(p))]
                ratios = fits[way]["latency"], fits[way]["bandwidth"]
                cells.append(f"{own[0].seconds / own[0].predicted_s(*ratios):.2f}" if own else "-")
        print(f"| {key[0]} | {key[1] / 1024:g} | {' | '.join(cells)} |", flush=True)


def _link(point: Point) -> tuple[float, float]:
    return point.latency_s, point.bandwidth_Bps


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="on shaped links")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 20.0], help="MB/s of shaped links")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", choices=("all", "memory"), default="all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="file for the constants")
    options = parser.parse_args(arguments)
    if len(set(options.ranks)) < 2 or not 2 <= min(options.ranks) <= max(options.ranks) <= 8 or options.rounds < 1:
        parser.error(
            f"found --ranks {options.ranks}, --rounds {options.rounds}; expected two or more numbers of ranks from 2 "
            "to 8, and 1 round or more"
        )
    if not all(0 < rate < float("inf") for rate in options.rates):
        parser.error(f"--rates: found {options.rates}; expected numbers of MB/s above 0")
    shaped = options.transport == "all"
    if shaped and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run as root, or with --transport memory")
    if options.write and not shaped:
        parser.error("--write: found --transport memory; expected all, because the file needs both kinds of links")
    about = machine()
    print(f"{options.rounds} rounds; {about}", flush=True)
    within = points(Case("memory", 2, None, SIZES_WITHIN), 3 * options.rounds)
    result: dict[str, Any] = {"within": constants(within)}
    show("one machine, 2 ranks: measured / predicted", within, result["within"])
    result["within"] = relative(result["within"])
    if not shaped:
        return 0
    cases = [Case("shaped", ranks, 1e6 * rate, SIZES) for rate in options.rates for ranks in sorted(set(options.ranks))]
    between = [point for case in cases for point in points(case, options.rounds)]
    result["between"] = constants(between)
    rates = " and ".join(f"{rate:g}" for rate in options.rates)
    show(f"shaped links of {rates} MB/s: measured / predicted", between, result["between"])
    if options.write:
        options.write.write_text(document(result, about, options) + "\n", encoding="utf-8")
    return 0


def document(found: dict[str, dict[str, dict[str, float]]], about: str, options: argparse.Namespace) -> str:
    """Return the JSON text of the file of constants."""
    ways = [
        {
            "name": way,
            **{where: {k: float(f"{row[way][k]:.3g}") for k in _KEPT} for where, row in sorted(found.items())},
            "bucket_nbytes": DDP_BUCKET_NBYTES if way == "Gloo" else BUCKET_NBYTES,
        }
        for way in WAYS
    ]
    rates = " and ".join(f"{rate:g}" for rate in options.rates)
    ranks = ", ".join(map(str, sorted(set(options.ranks))))
    text = (
        "Ratios of each communication backend: its latency per message and its bandwidth, divided by those of an "
        "exchange of messages on the same link (bandwidth between machines: by the rate of the link). between: on "
        "links between machines; within: on one machine, divided by those of MPI. spread: standard deviation of "
        "log(measured / predicted) of buffers from 64 KiB, with ratios that were fitted to other numbers of ranks. "
        "bucket_nbytes: part of the gradients that is reduced at once, by default of the implementation."
    )
    source = {
        "command": "python -m benchmarks.papers.framework_constants",
        "machine": about,
        "links": f"{rates} MB/s with {ranks} ranks on network namespaces; the memory of one machine with 2 ranks",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    return json.dumps({"about": text, "source": source, "backends": ways}, indent=2)


_KEPT = ("latency", "bandwidth", "spread")

if __name__ == "__main__":
    sys.exit(main())
