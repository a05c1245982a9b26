"""Parts of a plan that agents of earlier releases reject.

A plan contains only what differs from the defaults. An agent therefore rejects a plan of a later release only if the
plan uses something that was added after the agent's release. The agent cannot say so in a report, because it reports
only on plans that it has read.
"""

import json
from collections.abc import Callable, Iterator

from dlcontract.plan.plan import Plan
from dlcontract.plan.rank_groups import RANK_GROUPS

_PARTS: tuple[tuple[str, str, Callable[[Plan], bool]], ...] = (
    ("0.3.0", "spec.until", lambda plan: plan.until is not None),
    ("0.3.0", "spec.precision", lambda plan: plan.precision != "FP32"),
    ("0.3.0", "spec.optimizer.learningRateCurve Accuracy", lambda plan: plan.optimizer.rate_curve != "Loss"),
    ("0.3.0", "spec.activationCheckpointing", lambda plan: plan.activation_checkpointing),
    ("0.3.0", "spec.runPolicy.failureRules", lambda plan: bool(plan.failure_rules)),
    ("0.3.0", "spec.collective LayeredServer", lambda plan: plan.collective == "LayeredServer"),
    ("0.3.0", "spec.collective DDP", lambda plan: plan.collective == "DDP"),
    ("0.3.0", "spec.parallelism.strategy Sharded", lambda plan: plan.shards_model),
    ("0.3.0", "spec.parallelism.deferredInit", lambda plan: plan.model.deferred),
    (
        "0.3.0",
        "spec.parallelism.strategy Pipeline and Tensor with spec.trainer.command",
        lambda plan: plan.splits_model and bool(plan.model.command),
    ),
    ("0.3.0", "spec.parallelism.replicas", lambda plan: plan.replicas > 1),
    ("0.3.0", "spec.trainer.framework MPI", lambda plan: plan.model.framework == "MPI"),
    ("0.3.0", "a script without spec.globalBatchSize", lambda plan: not plan.batch_known),
    (
        "0.3.0",
        "gradient accumulation (spec.parallelism.gradientAccumulation)",
        lambda plan: plan.micro_batches > 1 and not plan.splits_model,
    ),
    ("0.3.0", "spec.checkpoint.uri", lambda plan: plan.checkpoint.uri is not None),
    ("0.3.0", "spec.trainer.elastic", lambda plan: plan.model.elastic),
    ("0.3.0", "numbers of ranks that a script refused (spec.trainer.elastic)", lambda plan: bool(plan.refused_ranks)),
    ("0.3.0", "interruptions of spot nodes", lambda plan: plan.checkpoint.interrupted_s is not None),
    ("0.3.0", "spec.dataset.distribution Sharded", lambda plan: plan.dataset.sharded),
    ("0.3.0", "ranks in their short form (spec.nodes.max)", lambda plan: RANK_GROUPS in json.loads(plan.to_json())),
)
"""Release, name for users, and a predicate that is True for plans with this part. Each part is newer than 0.2.0."""


def newer_parts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (name for users, release) of each part of the plan that agents before this release reject."""
    for release, name, contains in _PARTS:
        if contains(plan):
            yield name, release
