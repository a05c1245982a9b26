"""Translate a planner's decision into the plan for the trainer."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import dlcontract
from dljob.api import Collective, DLJobSpec, FailureRule, Framework, ParallelismStrategy, duration_s
from dljob.api.base import AUTO_INTERVAL
from dljob.cluster import quantity
from dljob.cluster.domains import Domain
from dljob.job.plan.grace import grace_s
from dljob.job.plan.request import learning_rate_rule, storage, train_samples
from dljob.planner import Choice, Decision, Group, Storage

TCP_SEGMENT_NBYTES = 56 * 2**10
"""Size in bytes of the segments in which ranks on several nodes send a bucket of gradients. It is below the eager limit
of Open MPI over TCP (64 KiB), so that a segment needs no handshake."""

INDEX_NBYTES = 16 * 2**20
"""Bytes of ``dataset.size`` that are not for shards."""


def _ranks(job: str, groups: tuple[Group, ...], domain: str) -> tuple[dlcontract.Rank, ...]:
    ranks: list[dlcontract.Rank] = []
    for group in groups:
        for i, share in enumerate(group.shares):
            node, local_rank = divmod(i, group.ranks_per_node)
            pod = f"{job}-{group.name}-{node}"
            ranks.append(
                dlcontract.Rank(
                    rank=len(ranks),
                    pod=pod,
                    host=f"{pod}.{domain}",
                    group=group.name,
                    device=group.device,
                    local_rank=local_rank,
                    gpu=group.is_gpu,
                    share=share,
                    role=dlcontract.Role.WORKER if share else dlcontract.Role.SERVER,
                )
            )
    return tuple(ranks)


def _dataset(spec: DLJobSpec) -> dlcontract.DatasetRef:
    if spec.dataset.name is not None:
        return dlcontract.DatasetRef(name=spec.dataset.name.value, samples=train_samples(spec))
    if not spec.dataset.given:
        return dlcontract.DatasetRef()
    found = dlcontract.DatasetRef(path=spec.dataset.path, samples=spec.dataset.samples)
    if not spec.dataset.sharded:
        return found
    assert spec.dataset.size is not None, "a rule of the API"
    size_nbytes = int(quantity(spec.dataset.size))
    return found.model_copy(
        update={
            "distribution": "Sharded",
            "uri": spec.dataset.uri,
            "sha256": spec.dataset.sha256,
            # The rest is for the index of the blocks, so that the kubelet does not evict the pod.
            "size_nbytes": max(size_nbytes // 2, size_nbytes - INDEX_NBYTES, 1),
        }
    )


def _measures(spec: DLJobSpec, chosen: Choice, strategy: str) -> bool:
    """Return True if the ranks measure the collectives (algorithms of the all-reduce) and then use the fastest one.

    The collective in the plan is then only the planner's prediction of the fastest one. Return False if the ranks must
    use the collective in the plan. ``strategy``: parallelism strategy of the plan, as ``parallelism`` returns it.
    """
    several = sum(len(group.shares) for group in chosen.groups) > 1
    theirs = spec.collective is Collective.AUTO and spec.gradient_compression is None and strategy == "Data"
    return several and theirs and chosen.collective in dlcontract.MEASURABLE


def parallelism(spec: DLJobSpec, chosen: Choice) -> str:
    """Return the parallelism strategy of the plan: the spec's, or if that is Auto, the planner's choice.

    A plan with only one rank has the spec's strategy too, although there is nothing to parallelize.
    """
    asked = spec.parallelism.strategy
    return chosen.strategy if asked is ParallelismStrategy.AUTO else asked.value


def _min_ranks(spec: DLJobSpec, choice: Choice) -> int:
    """Return the smallest number of ranks with which the trainer may continue after other ranks have failed.

    With model parallelism and strategy Sharded, the trainer needs all ranks. Scripts that shard the model themselves
    may not. Otherwise, sort the nodes by their numbers of ranks, the fewest ranks first, and add up the ranks of the
    first ``spec.nodes.min`` nodes. The number of parameter servers (ranks without samples) is added to this sum. The
    remaining ranks must also have space for all shards of the data. The result is at most the number of all ranks.
    """
    if choice.in_parts and spec.trainer.framework is Framework.DLTRAIN:
        return sum(len(g.shares) for g in choice.groups)
    servers = sum(share == 0 for g in choice.groups for share in g.shares)
    per_node = sorted(g.ranks_per_node for g in choice.groups for _ in range(g.nodes))
    nodes = [
        g.shares[node * g.ranks_per_node : (node + 1) * g.ranks_per_node]
        for g in choice.groups
        for node in range(g.nodes)
    ]
    least = max(sum(per_node[: spec.nodes.min]), enough_for_shards(storage(spec), nodes))
    return min(sum(per_node), max(1, least + servers))


def enough_for_shards(space: Storage | None, nodes: Sequence[Sequence[int]]) -> int:
    """Return the smallest number of workers of which any have space for all shards of the data.

    After a loss, the others divide the batch, and so the data, in proportion to their local batch sizes. ``space``: the
    space on each node; None if no data is fetched. ``nodes``: the local batch sizes on each node. The result exceeds
    the number of workers if no worker may be lost.
    """
    if space is None or not space.sharded or not space.data_nbytes:
        return 1
    most = space.shard_room_nbytes / space.data_nbytes
    counts = Counter(share for shares in nodes for share in shares if share)
    kinds = {tuple(sorted((share for share in shares if share), reverse=True)) for shares in nodes} - {()}
    # The worst case for a node: its own ranks live, and of the others the smallest.
    others = {own: (0, *accumulate(sorted((counts - Counter(own)).elements()))) for own in kinds}

    def fits(alive: int) -> bool:
        for own, smallest in others.items():
            kept = min(alive, len(own))
            mine = sum(own[:kept])
            if mine > most * (mine + smallest[min(alive - kept, len(smallest) - 1)]):
                return False
        return True

    return bisect_left(range(1, counts.total() + 1), True, key=fits) + 1


def _checkpoint(spec: DLJobSpec, domain: Domain) -> dlcontract.CheckpointRef:
    place = {"uri": spec.checkpoint.uri} if spec.checkpoint.enabled and spec.checkpoint.uri else {}
    given = dlcontract.CheckpointRef(enabled=spec.checkpoint.enabled, keep=spec.checkpoint.keep, **place)
    if spec.checkpoint.interval == AUTO_INTERVAL:
        per_node_h = domain.interruptions_per_h
        expected = {"interrupted_s": 3600 / per_node_h} if spec.checkpoint.enabled and per_node_h else {}
        return given.model_copy(update={"choose_interval": True, **expected})
    return given.model_copy(update={"interval_s": duration_s(spec.checkpoint.interval)})


def _until(spec: DLJobSpec) -> dlcontract.Until | None:
    until = spec.until
    if until is None:
        return None
    return dlcontract.Until(
        metric=until.metric, at_least=until.at_least, at_most=until.at_most, patience=until.patience
    )


def trainer_plan(
    name: str,
    namespace: str,
    uid: str,
    spec: DLJobSpec,
    decision: Decision,
    number: int,
    term: int,
    service: str,
    cluster_domain: str,
    *,
    checkpoint_s: float | None = None,
    former_grace_s: float | None = None,
    refused_ranks: Iterable[int] = (),
) -> dlcontract.Plan:
    """Return the trainer's plan for a decision of the planner.

    A script for Torchrun or MPI gets a data-parallel plan in float32: it shards, accumulates and recomputes itself, and
    what the spec says about it (``request.computation``) is for predictions only.

    ``name``, ``namespace``, ``uid``: those of the job. ``number``: number of the plan, counted from 1 for each job.
    ``term``: number that the operator raises when it fences a lost node. ``checkpoint_s``: the measured time of a
    checkpoint in seconds; None: use the predicted one. ``former_grace_s``: grace period in seconds of the former plan,
    see ``grace.grace_s``; None without one. ``refused_ranks``: numbers of ranks on which the script failed before.

    Pods have the names of their StatefulSets, ``<job>-<group>-<index>``, and the DNS names of the headless ``service``,
    ``<pod>.<service>.<namespace>.svc.<cluster_domain>``.
    """
    chosen, optimizer = decision.chosen, spec.optimizer
    spread = sum(g.nodes for g in chosen.groups) > 1
    own = spec.trainer.framework is Framework.DLTRAIN
    strategy = parallelism(spec, chosen) if own else ParallelismStrategy.DATA.value
    # Without a global batch size in the spec, each rank has a local batch of 1, which no script sees.
    ranks = sum(len(group.shares) for group in chosen.groups)
    batch = decision.batch.chosen if decision.batch else spec.global_batch_size or ranks
    # With another batch size than the spec's, the steps for the same progress need not be whole epochs.
    steps = decision.batch.steps if decision.batch and batch != spec.global_batch_size else spec.steps
    # The plan's format requires a length. Without one in the spec, it is one epoch of unknown length, which no script
    # sees. The number of steps then stays unknown.
    epochs = spec.epochs or (1 if steps is None else None)
    rule = learning_rate_rule(spec, batch)
    return dlcontract.Plan(
        job=name,
        namespace=namespace,
        uid=uid,
        number=number,
        term=term,
        ranks=_ranks(name, chosen.groups, f"{service}.{namespace}.svc.{cluster_domain}"),
        global_batch=batch,
        **({} if decision.batch or spec.global_batch_size else {"batch_known": False}),
        collective=chosen.collective,
        measure_collective=_measures(spec, chosen, strategy),
        compression=spec.gradient_compression.value if spec.gradient_compression else None,
        parallelism=strategy,
        micro_batches=chosen.micro_batches if own else 1,
        replicas=chosen.replicas,
        precision=chosen.precision if own else "FP32",
        activation_checkpointing=chosen.recomputes and own,
        synchronization=spec.parallelism.synchronization.value,
        staleness_bound=spec.parallelism.staleness_bound,
        refused_ranks=tuple(sorted(each for each in refused_ranks if each < ranks))[: dlcontract.MAX_REFUSED_SIZES],
        **({"segment_nbytes": TCP_SEGMENT_NBYTES} if spread else {}),
        **({"bucket_nbytes": dlcontract.DDP_BUCKET_NBYTES} if chosen.collective == "DDP" else {}),
        model=dlcontract.ModelRef(
            name=spec.model.name.value if spec.model.name else None,
            command=(*spec.trainer.command, *spec.trainer.args),
            framework=spec.trainer.framework.value,
            sync_batch_norm=spec.model.sync_batch_norm,
            deferred=bool(spec.parallelism.deferred_init) and strategy == "Sharded",
            elastic=spec.elastic_script and _min_ranks(spec, chosen) < ranks,
        ),
        dataset=_dataset(spec),
        optimizer=dlcontract.OptimizerRef(
            name=optimizer.name.value,
            learning_rate=optimizer.learning_rate,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            find_rate=optimizer.find_learning_rate,
            rate_curve=optimizer.learning_rate_curve.value if optimizer.learning_rate_curve else "Loss",
            scaling=rule[0].value if rule else None,
            base_batch=rule[1] if rule else None,
        ),
        epochs=epochs if steps is None else None,
        steps=steps,
        seed=spec.seed,
        # Local batch sizes that the user sets stay. Torchrun scripts and MPI programs ignore shares.
        rebalance=spec.planning.uneven
        and all(group.batch_per_rank is None for group in spec.planning.groups)
        and own
        and not chosen.in_parts
        and not spec.parallelism.asynchronous,
        checkpoint=_checkpoint(spec, decision.domain),
        compare_steps=spec.run_policy.compare_parameters_steps,
        min_ranks=_min_ranks(spec, chosen),
        backoff_limit=spec.run_policy.backoff_limit,
        failure_rules=tuple(map(failure_rule, spec.run_policy.failure_rules)),
        grace_s=grace_s(
            spec,
            decision.checkpoint_s if checkpoint_s is None else checkpoint_s,
            chosen.prediction.step_p90_s,
            former_grace_s,
        ),
        until=_until(spec),
        expected=dlcontract.Expectation(
            step_s=chosen.prediction.step_s,
            step_p90_s=chosen.prediction.step_p90_s,
            total_s=chosen.prediction.total_s - chosen.prediction.fetch_s,
        ),
    )


def failure_rule(rule: FailureRule) -> dlcontract.FailureRule:
    """Return a failure rule of the spec in the form that the coordinator reads from the trainer's plan.

    A rule about conditions of nodes or pods has neither exit codes nor reasons in this form, so that it matches no
    failure there. The operator itself applies such rules.
    """
    codes = rule.on_exit_codes
    return dlcontract.FailureRule(
        action=rule.action.value,
        exit_codes=None if codes is None else dlcontract.ExitCodes(operator=codes.operator.value, values=codes.values),
        reasons=tuple(reason.value for reason in rule.on_reasons),
    )
