"""Simulate synchronous, stale-synchronous (SSP) and asynchronous training as discrete events.

The results are compared with the formulas of ``dljob.perf.step.synchronization``.

    python -m benchmarks.perfmodel.sync_simulation [--steps 4000] [--check] [--json]

Times of computing and of the server follow a gamma distribution with the given coefficient of variation. ``--check``
fails (exit code 1) if a formula is more than 5 % off.
"""

import argparse
import heapq
import json
import sys
from dataclasses import asdict, dataclass

import numpy as np

from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor, staleness, straggler_factor

LIMIT = 0.05
RANKS = (2, 4, 8, 32, 128)
VARIATIONS = (0.03, 0.1, 0.3)
BOUNDS = (1, 2, 4, 16)
LOADS = (0.3, 0.8, 1.0, 1.2, 2.0)
"""Loads of the server: service time of all workers over the round time of one worker."""


@dataclass(frozen=True)
class Row:
    kind: str
    ranks: int
    variation: float
    setting: float
    """Staleness bound in steps, or load of the server."""
    simulated: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.simulated - 1


def draw(rng: np.random.Generator, mean: float, variation: float, count: int) -> list[float]:
    return [float(x) for x in rng.gamma(variation**-2, mean * variation**2, count)]


def bounded_step(ranks: int, bound: int, variation: float, steps: int, seed: int = 0) -> float:
    """Return the mean step over a rank's mean if ranks begin step k once all have finished step k - 1 - ``bound``."""
    rng = np.random.default_rng(seed)
    done, last = np.zeros(ranks), [0.0] * (bound + 1)
    for _ in range(steps):
        done = np.maximum(done, last[0]) + rng.gamma(variation**-2, variation**2, ranks)
        last = [*last[1:], float(done.max())]
    return float(done.max()) / steps


def asynchronous(
    workers: int, think_s: float, service_s: float, variation: float, updates: int, seed: int = 0
) -> tuple[float, float]:
    """Return the updates per second and their mean staleness for a server that applies them one after another."""
    rng = np.random.default_rng(seed)
    thinks, services = (draw(rng, mean, variation, updates + workers) for mean in (think_s, service_s))
    arrivals = [(thinks.pop(), worker) for worker in range(workers)]
    heapq.heapify(arrivals)
    read_at, free_s, begun_s, stale, warm = [0] * workers, 0.0, 0.0, 0, updates // 5
    for update in range(updates):
        arrived_s, worker = heapq.heappop(arrivals)
        free_s = max(arrived_s, free_s) + services.pop()
        if update == warm:
            begun_s = free_s
        stale += update - read_at[worker] if update > warm else 0
        read_at[worker] = update + 1
        heapq.heappush(arrivals, (free_s + thinks.pop(), worker))
    counted = updates - 1 - warm
    return counted / (free_s - begun_s), stale / counted


def rows(steps: int) -> list[Row]:
    found = []
    for ranks in RANKS:
        for v in VARIATIONS:
            found.append(Row("synchronous", ranks, v, 0, bounded_step(ranks, 0, v, steps), straggler_factor(ranks, v)))
            for bound in BOUNDS:
                simulated = bounded_step(ranks, bound, v, steps)
                found.append(Row("SSP", ranks, v, bound, simulated, stale_factor(ranks, bound, v)))
            for load in LOADS:
                service_s = load / ranks
                if service_s >= 1:
                    continue
                rate, stale = asynchronous(ranks, 1 - service_s, service_s, v, 5 * steps)
                predicted = asynchronous_updates_per_s(ranks, 1 - service_s, service_s, v)
                found.append(Row("asynchronous", ranks, v, load, rate, predicted))
                found.append(Row("staleness", ranks, v, load, stale, staleness(ranks)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.steps < 100:
        parser.error(f"--steps {options.steps}: expected 100 or more, so that means converge")
    found = rows(options.steps)
    if options.json:
        print(json.dumps([{**asdict(r), "error": r.error} for r in found]))
    else:
        print("synchronous, SSP: mean step over a rank's mean. asynchronous: updates per round of an unblocked worker.")
        print(
            f"{'kind':<14}{'ranks':>6}{'variation':>11}{'bound/load':>12}{'simulated':>11}{'predicted':>11}{'error':>9}"
        )
        for r in found:
            print(
                f"{r.kind:<14}{r.ranks:>6}{r.variation:>11.2f}{r.setting:>12g}"
                f"{r.simulated:>11.3f}{r.predicted:>11.3f}{100 * r.error:>+8.1f}%"
            )
    worst = max(found, key=lambda r: abs(r.error))
    print(f"worst: {worst.kind}, {worst.ranks} ranks: {100 * worst.error:+.1f} %", file=sys.stderr)
    return 1 if options.check and abs(worst.error) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
