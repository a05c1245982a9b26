"""Job streams in the shape of the public Pollux workload, and the mixed pool of the Sia evaluation.

Shapes, not copies: 160 jobs arrive within 8 hours, with a peak in the fourth hour (Pollux, OSDI 2021, section 5.1, from
the Microsoft trace). The models and their parts of the stream are those of its table 1, and so are the categories by
device-hours. The pool has 24 T4, 24 RTX 2080 Ti and 16 A100 (Sia, SOSP 2023, section 5).
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from benchmarks.scheduling.uses import Use, fastest, uses

from dljob.cluster import ClusterView, Node
from dljob.planner import Request

HOURS = 8
HOURLY = (1.0, 1.4, 2.0, 3.0, 2.4, 1.8, 1.4, 1.0)
"""Arrivals per hour, relative to the first. Pollux: the fourth hour has three times as many as the first."""
T4, RTX, A100 = "Tesla-T4", "rtx-2080-ti", "NVIDIA-A100-SXM4-40GB"
POOL = ((T4, 6, 4), (RTX, 3, 8), (A100, 2, 8))
"""(device, nodes, devices per node)"""
NETWORK_BPS = 50e9 / 8
NOISE = 0.2
"""Standard deviation of the logarithm of true run time / predicted run time, one draw per job."""
SLACK = (0.5, 1.5)
"""Time until the deadline, relative to the run time that the user expects (ElasticFlow, ASPLOS 2023, section 6.1)."""
START_S = 45.0
"""Seconds without progress when pods start. benchmarks/cluster/startup.py and the how-to pages state 20 s to 60 s."""
MODELS = {
    "resnet18": Request("resnet18", 256, 1, model="resnet18", dataset="synthetic-images"),
    "neumf": Request(
        "neumf", 16_384, 1, parameters=7_000_000, flops_per_sample=2e6, activation_nbytes_per_sample=8_000,
        sample_nbytes=16,
    ),
    "deepspeech2": Request(
        "deepspeech2", 40, 1, parameters=38_000_000, flops_per_sample=90e9, activation_nbytes_per_sample=40_000_000,
        sample_nbytes=500_000,
    ),
    "yolov3": Request(
        "yolov3", 32, 1, parameters=62_000_000, flops_per_sample=198e9, activation_nbytes_per_sample=150_000_000,
        sample_nbytes=500_000,
    ),
    "resnet50": Request(
        "resnet50", 256, 1, parameters=25_600_000, flops_per_sample=24.6e9, activation_nbytes_per_sample=60_000_000,
        sample_nbytes=600_000,
    ),
}  # fmt: skip
"""The models by their published sizes. Batches lie between the smallest and the largest of Pollux, and are fixed."""
MOST_BY_USER = 16
"""Most devices that a user chooses. Without a size in the range of Pollux, the user chooses the largest one."""
SHAPE = (
    ("resnet18", 0.36, 0.05, 1.0),
    ("neumf", 0.36, 0.05, 1.0),
    ("deepspeech2", 0.20, 1.0, 10.0),
    ("yolov3", 0.06, 10.0, 100.0),
    ("resnet50", 0.02, 100.0, 200.0),
)
"""(model, part of the jobs, least and most device-hours on one T4), log-uniform. The largest category ends at 1,000 in
the trace. Here it ends at 200, so that one job does not decide the makespan."""


@dataclass(frozen=True)
class Job:
    """A job of the stream. Only the simulator and the clairvoyant policy may read ``noise``."""

    name: str
    model: str
    namespace: str
    arrival_s: float
    request: Request
    noise: float
    user_devices: int
    """Number of devices that the user chose: the speed-up is half to four fifths of the ideal one (Pollux, 5.2)."""
    deadline_s: float
    """Moment by which the user wants the result, in seconds of the simulation."""

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return the possible plans on one device type each, with predicted seconds of the whole training."""
        return _scaled(self.model, self.request.total_steps)


@cache
def _scaled(model: str, steps: int) -> tuple[Use, ...]:
    return tuple(use.times(steps) for use in model_uses(model))


@cache
def model_uses(model: str) -> tuple[Use, ...]:
    """Return the possible plans for one step of a model."""
    return uses(MODELS[model], POOL, lambda device, nodes, per_node: view(((device, nodes, per_node),)))


def view(pool: tuple[tuple[str, int, int], ...] = POOL) -> ClusterView:
    """Return empty nodes of a pool."""
    return ClusterView(
        tuple(
            Node(
                f"{device}-{i}".lower(), device, per_node, per_node, cpu=96, free_cpu=96, free_memory_nbytes=2**39,
                link_bandwidth_Bps=NETWORK_BPS, is_gpu=True,
            )
            for device, nodes, per_node in pool
            for i in range(nodes)
        )
    )  # fmt: skip


def stream(seed: int, jobs: int = 160, load: float = 1.0, noise: float = NOISE) -> tuple[Job, ...]:
    """Return a stream of jobs in order of arrival. ``load``: factor of all device-hours."""
    rng = np.random.default_rng(seed)
    hours = rng.choice(HOURS, jobs, p=np.array(HOURLY) / sum(HOURLY)) + rng.random(jobs)
    kinds = rng.choice(len(SHAPE), jobs, p=[part for _, part, _, _ in SHAPE])
    return tuple(_job(rng, i, 3600 * hour, SHAPE[kind], load, noise) for i, (hour, kind) in enumerate(
        zip(np.sort(hours), kinds, strict=True)
    ))  # fmt: skip


def _job(
    rng: np.random.Generator,
    i: int,
    arrival_s: float,
    shape: tuple[str, float, float, float],
    load: float,
    noise: float,
) -> Job:
    model, _, low, high = shape
    hours = load * float(np.exp(rng.uniform(np.log(low), np.log(high))))
    on_t4 = [use for use in model_uses(model) if use.device == T4]
    one_s = on_t4[0].devices * on_t4[0].seconds
    steps = max(1, round(3600 * hours / one_s))
    request = replace(MODELS[model], job=f"job-{i:03}", total_steps=steps)
    sizes = [use for use in on_t4 if use.devices <= MOST_BY_USER]
    tuned = [use.devices for use in sizes if 0.5 <= one_s / use.seconds / use.devices <= 0.8]
    user = int(rng.choice(tuned or [sizes[-1].devices]))
    at_user = fastest(use for use in on_t4 if use.devices == user).seconds * steps
    factor, slack, team = float(np.exp(rng.normal(0, noise))), rng.uniform(*SLACK), int(rng.integers(4))
    return Job(
        request.job,
        model,
        f"team-{team}",
        arrival_s,
        request,
        factor,
        user,
        arrival_s + float(slack) * (START_S + at_user),
    )
