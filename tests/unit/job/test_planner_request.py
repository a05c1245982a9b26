"""Tests of the translation of a DLJob into a planner request, and of a decision into status and trainer plan."""

from dataclasses import replace
from typing import Any

import pytest

import dlcontract
from dljob.api import DLJobSpec, PlanStatus
from dljob.cluster import ClusterView, cluster_view
from dljob.job.identity import profile_key
from dljob.job.plan.request import planner_request, total_steps
from dljob.job.plan.status import plan_status
from dljob.job.plan.trainer import trainer_plan
from dljob.planner import Decision, FixedChoice, plan
from dljob.planner.candidates.cost.interrupted import SHORTEST_CHECKPOINT_S

BASE: dict[str, Any] = {
    "model": {"name": "digits-cnn"},
    "dataset": {"name": "digits"},
    "globalBatchSize": 96,
    "epochs": 25,
}
ASYNCHRONOUS = {"synchronization": "StaleSynchronous", "stalenessBound": 3}
THREE = cluster_view({"nodes": [{"name": "n", "count": 3, "cpu": 2}]})
UNLIKE = cluster_view(
    {
        "nodes": [
            {"name": "a", "count": 2, "device": "NVIDIA-A100-SXM4-40GB", "devices": 2, "cpu": 32, "memory": "64Gi"},
            {"name": "t", "count": 1, "device": "Tesla-T4", "devices": 4, "cpu": 32, "memory": "64Gi"},
        ]
    }
)


def spec(**changes: Any) -> DLJobSpec:
    return DLJobSpec.model_validate({k: v for k, v in (BASE | changes).items() if v is not None})


def decided(job_spec: DLJobSpec, view: ClusterView = THREE) -> Decision:
    found = plan(planner_request("job", job_spec), view, {})
    assert isinstance(found, Decision), found
    return found


def planned(job_spec: DLJobSpec, view: ClusterView = THREE) -> dlcontract.Plan:
    return trainer_plan("job", "team", "uid-1", job_spec, decided(job_spec, view), 3, 2, "job", "cluster.local")


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 25 * 15),  # 1437 / 96 is 14.97, so the last batch of an epoch is partial
        ({"globalBatchSize": 1437}, 25),
        ({"globalBatchSize": 1438}, 25),
        ({"globalBatchSize": 1436}, 50),
        ({"epochs": None, "steps": 7}, 7),
        ({"dataset": {"uri": "file:///data.npz", "samples": 100}, "globalBatchSize": 30, "epochs": 2}, 8),
        ({"model": {"name": "mlp"}, "dataset": {"name": "iris"}, "globalBatchSize": 32, "epochs": 1}, 4),
    ],
)
def test_number_of_training_steps(changes: dict[str, Any], steps: int) -> None:
    assert total_steps(spec(**changes)) == steps


def test_request_contains_the_fields_of_the_spec() -> None:
    request = planner_request(
        "job",
        spec(
            optimizer={"name": "Adam"},
            nodes={"min": 2, "max": 4},
            devices=["t4"],
            objective={"minimize": "Energy", "deadline": "1h30m"},
            collective="Tree",
            planning={"uneven": False, "candidates": 7},
            scheduling={"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
            resources={"cpu": "500m", "cpuLimit": "2", "memory": "2Gi"},
        ),
    )
    assert (request.job, request.model, request.dataset, request.profile) == (
        "job",
        "digits-cnn",
        "digits",
        "digits-cnn",
    )
    assert (request.global_batch, request.total_steps, request.optimizer) == (96, 375, "Adam")
    assert (request.nodes_min, request.nodes_max, request.devices) == (2, 4, ("t4",))
    assert (request.minimize, request.deadline_s, request.collective) == ("Energy", 5400.0, "Tree")
    assert (request.uneven, request.candidates_kept) == (False, 7)
    assert (request.node_selector, request.tolerations) == ({"a": "b"}, ({"operator": "Exists"},))
    assert (request.cpu_per_pod, request.cpu_limit_per_pod, request.memory_per_pod_nbytes) == (0.5, 2.0, 2**31)


def test_request_contains_fixed_groups_and_hints() -> None:
    group = {"device": "cpu", "nodes": 2, "ranksPerNode": 2, "batchPerRank": 24}
    request = planner_request("job", spec(planning={"mode": "Fixed", "groups": [group]}))
    assert request.fixed == (FixedChoice("cpu", 2, 2, 24),)
    hints = {"parameters": 10, "flopsPerSample": 1e6, "activationBytesPerSample": 5}
    request = planner_request("job", spec(model={"hints": hints}, trainer={"command": ["python", "t.py"]}))
    assert (request.model, request.parameters, request.flops_per_sample) == (None, 10, 1e6)
    assert request.activation_nbytes_per_sample == 5
    request = planner_request(
        "job", spec(model={"hints": {"like": "GPT-2-XL"}}, trainer={"command": ["python", "t.py"]})
    )
    assert (request.model, request.like, request.parameters, request.flops_per_sample) == (None, "GPT-2-XL", None, None)


def test_torchrun_script_has_equal_shares_and_collective_torch() -> None:
    job_spec = spec(trainer={"command": ["python", "t.py"], "framework": "Torchrun"}, nodes={"min": 3})
    request = planner_request("job", job_spec)
    assert (request.collective, request.uneven) == ("Torch", False)
    output = planned(job_spec)
    assert not output.rebalance
    assert output.model == dlcontract.ModelRef(name="digits-cnn", command=("python", "t.py"), framework="Torchrun")


def test_mpi_program_has_equal_shares_and_collective_mpi() -> None:
    job_spec = spec(trainer={"command": ["python", "t.py"], "framework": "MPI"}, nodes={"min": 3})
    request = planner_request("job", job_spec)
    assert (request.collective, request.uneven) == ("MPI", False)
    output = planned(job_spec)
    assert not output.rebalance and (output.collective, output.model.framework) == ("MPI", "MPI")


SCRIPT = {
    "model": {"hints": {"parameters": 10, "flopsPerSample": 1e6}},
    "trainer": {"command": ["python", "t.py"]},
}


@pytest.mark.parametrize(
    ("changes", "chooses", "fixed"),
    [
        ({}, True, 1),
        ({"parallelism": {"strategy": "Optimizer"}}, True, 1),
        ({"parallelism": {"strategy": "Auto"}}, True, 1),
        ({"parallelism": {"gradientAccumulation": "Never"}}, False, 1),
        ({"parallelism": {"microBatches": 4}}, False, 4),
        ({"parallelism": {"strategy": "Tensor"}, "model": {"name": "mlp"}}, False, 1),
        ({"parallelism": {"strategy": "Pipeline", "stages": 2}}, False, 8),
        ({"parallelism": ASYNCHRONOUS}, False, 1),
        (SCRIPT, False, 1),
        (SCRIPT | {"parallelism": {"gradientAccumulation": "Auto"}}, True, 1),
        (SCRIPT | {"parallelism": {"microBatches": 2}}, False, 2),
        (SCRIPT | {"trainer": {"command": ["a"], "framework": "Torchrun"}}, False, 1),
        (SCRIPT | {"trainer": {"command": ["a"], "framework": "MPI"}}, False, 1),
        (SCRIPT | {"trainer": {"command": ["a"], "framework": "MPI"}, "parallelism": {"microBatches": 2}}, False, 2),
        (
            {"model": None, "trainer": {"command": ["a"], "framework": "MPI"}, "parallelism": {"microBatches": 2}},
            False,
            1,
        ),
    ],
)
def test_only_built_in_models_and_scripts_that_opt_in_get_micro_batches(
    changes: Any, chooses: bool, fixed: int
) -> None:
    request = planner_request("job", spec(**changes))
    assert (request.chooses_micro_batches, request.micro_batches) == (chooses, fixed)


def test_accumulation_is_in_the_plans_for_trainer_and_user() -> None:
    tight = spec(
        model={"name": "gpt-mini"}, dataset={"name": "synthetic-tokens"}, globalBatchSize=256, epochs=None, steps=9,
        resources={"memory": "1Gi"},
    )  # fmt: skip
    decision = decided(tight)
    assert decision.chosen.micro_batches > 1
    assert planned(tight).micro_batches == decision.chosen.micro_batches
    assert plan_status(tight, decision, 1, "digest").micro_batches == decision.chosen.micro_batches
    assert plan_status(spec(), decided(spec()), 1, "digest").micro_batches is None
    assert planned(spec(parallelism={"microBatches": 3})).micro_batches == 3


def test_training_options_are_in_the_plan() -> None:
    hints = {"parameters": 10, "flopsPerSample": 1e6}
    output = planned(spec(model={"hints": hints, "syncBatchNorm": True}, trainer={"command": ["python", "t.py"]}))
    assert planned(spec(parallelism={"strategy": "Optimizer"})).parallelism == "Optimizer"
    assert planned(spec(parallelism={"strategy": "Optimizer"})).collective == "Ring"
    assert planner_request("job", spec(parallelism={"strategy": "Auto"})).strategy == "Auto"
    script = spec(parallelism={"strategy": "Auto"}, model={"hints": hints}, trainer={"command": ["python", "t.py"]})
    assert planner_request("job", script).strategy == "Data", "it is unknown whether the optimizer can be sharded"
    staged = {"strategy": "Pipeline", "stages": 2}
    pipeline = planned(spec(parallelism=staged))
    assert (pipeline.parallelism, pipeline.micro_batches, pipeline.collective) == ("Pipeline", 8, "MPI")
    assert ([rank.share for rank in pipeline.ranks], pipeline.min_ranks) == ([96, 96], 2)
    assert not pipeline.rebalance
    assert planned(spec(parallelism=staged | {"microBatches": 3})).micro_batches == 3
    assert planned(spec(parallelism=staged, globalBatchSize=5)).micro_batches == 5
    tensor = planned(spec(model={"name": "mlp"}, parallelism={"strategy": "Tensor"}, collective="Tree"))
    assert (tensor.parallelism, tensor.collective, tensor.ranks[-1].share) == ("Tensor", "Tree", 96)
    tight = spec(
        model={"name": "resnet18"}, dataset={"name": "synthetic-images"}, globalBatchSize=256, epochs=None, steps=9,
        parallelism={"strategy": "Auto", "gradientAccumulation": "Never"}, resources={"memory": "1Gi"},
    )  # fmt: skip
    chosen = planned(tight)
    assert (chosen.parallelism, chosen.collective, chosen.min_ranks, chosen.rebalance) == ("Pipeline", "MPI", 3, False)
    assert chosen.micro_batches == decided(tight).chosen.micro_batches > 3
    assert [rank.share for rank in chosen.ranks] == [256] * 3
    shown = plan_status(tight, decided(tight), 1, "digest")
    assert (shown.parallelism, shown.micro_batches) == ("Pipeline", chosen.micro_batches)
    whole = planner_request(
        "job", spec(parallelism={"strategy": "Auto"}, optimizer={"findLearningRate": True})
    ).no_split_reason
    assert whole is not None and "findLearningRate" in whole
    stale = planned(spec(parallelism=ASYNCHRONOUS))
    assert (stale.synchronization, stale.staleness_bound, stale.collective) == (
        "StaleSynchronous",
        3,
        "ParameterServer",
    )
    assert sum(rank.share == 0 for rank in stale.ranks) == 1 and not stale.rebalance
    assert "ParameterServer within 3 steps" in decided(spec(parallelism=ASYNCHRONOUS)).chosen.summary
    single = plan(planner_request("job", spec(parallelism=ASYNCHRONOUS, nodes={"max": 1})), THREE, {})
    assert not isinstance(single, Decision), "a worker and a server need two ranks"
    scaling = {"rule": "AdaScale", "baseBatchSize": 16}
    optimizer = planned(spec(optimizer={"learningRateScaling": scaling})).optimizer
    assert (optimizer.scaling, optimizer.base_batch) == ("AdaScale", 16)
    search = planned(spec(optimizer={"findLearningRate": True})).optimizer
    assert (search.find_rate, search.rate_curve) == (True, "Loss")
    by_accuracy = planned(spec(optimizer={"findLearningRate": True, "learningRateCurve": "Accuracy"}))
    assert by_accuracy.optimizer.rate_curve == "Accuracy"
    assert any("learningRateCurve" in name for name, _ in dlcontract.newer_parts(by_accuracy))
    assert planned(spec(runPolicy={"compareParametersSteps": 7})).compare_steps == 7
    assert output.model.sync_batch_norm and not planned(spec()).model.sync_batch_norm


def test_scripts_and_models_have_separate_profiles() -> None:
    keys = [
        profile_key(s)
        for s in (
            spec(),
            spec(model={"name": "mlp"}, dataset={"name": "digits"}),
            spec(model={"name": "mlp"}, dataset={"name": "iris"}),
            spec(dataset={"uri": "pvc://c/a.npz", "samples": 5}),
            spec(dataset={"uri": "pvc://c/b.npz", "samples": 5}),
            spec(trainer={"command": ["a"]}),
            spec(trainer={"command": ["a"], "args": ["--x"]}),
            spec(trainer={"command": ["a"], "image": "i"}),
        )
    ]
    assert keys[:3] == ["digits-cnn", "mlp", "mlp.iris"]
    assert len(set(keys)) == len(keys)
    assert profile_key(spec(epochs=3, seed=1)) == keys[0]


def test_trainer_plan_contains_the_decision() -> None:
    output = planned(spec(nodes={"min": 3}, collective="Ring", checkpoint={"interval": "5s", "keep": 2}))
    assert [(r.rank, r.pod, r.host, r.local_rank, r.share, r.gpu) for r in output.ranks] == [
        (i, f"job-cpu-{i}", f"job-cpu-{i}.job.team.svc.cluster.local", 0, 32, False) for i in range(3)
    ]
    assert (output.job, output.namespace, output.uid, output.number, output.term) == (
        "job",
        "team",
        "uid-1",
        3,
        2,
    )
    assert (output.collective, output.min_ranks, output.epochs, output.steps) == (
        "Ring",
        3,
        25,
        None,
    )
    assert output.dataset == dlcontract.DatasetRef(name="digits", samples=1437)
    assert output.checkpoint == dlcontract.CheckpointRef(enabled=True, interval_s=5.0, keep=2)
    assert planned(spec(nodes={"min": 3})).checkpoint == dlcontract.CheckpointRef(choose_interval=True)
    assert output.expected.step_s > 0
    beside_checkpoint_s = output.expected.total_s - SHORTEST_CHECKPOINT_S
    assert 1.0 < beside_checkpoint_s / (375 * output.expected.step_s) < 1.1, "steps, evaluations and a checkpoint"
    assert output.rebalance and not output.measure_collective
    assert dlcontract.Plan.parse(output.to_json()) == output


def test_ranks_are_contiguous_by_group_then_node_then_device() -> None:
    groups = [
        {"device": "a100", "nodes": 2, "ranksPerNode": 2, "batchPerRank": 20},
        {"device": "t4", "nodes": 1, "ranksPerNode": 2, "batchPerRank": 8},
    ]
    output = planned(spec(planning={"mode": "Fixed", "groups": groups}), UNLIKE)
    assert [(r.pod, r.local_rank, r.share, r.gpu) for r in output.ranks] == [
        ("job-a100-sxm4-40gb-0", 0, 20, True),
        ("job-a100-sxm4-40gb-0", 1, 20, True),
        ("job-a100-sxm4-40gb-1", 0, 20, True),
        ("job-a100-sxm4-40gb-1", 1, 20, True),
        ("job-t4-0", 0, 8, True),
        ("job-t4-0", 1, 8, True),
    ]
    assert not output.rebalance, "the user fixed the shares"


def test_compressed_gradients_are_faster() -> None:
    plain, compressed = (planned(spec(nodes={"min": 3}, **how)) for how in ({}, {"gradientCompression": "FP16"}))
    assert (plain.compression, compressed.compression, compressed.collective) == (None, "FP16", "Ring")
    assert compressed.expected.step_s < plain.expected.step_s


@pytest.mark.parametrize(
    ("changes", "measures"),
    [
        ({}, True),
        ({"nodes": {"max": 1}}, False),
        ({"collective": "Ring"}, False),
        ({"gradientCompression": "BF16"}, False),
        ({"parallelism": {"strategy": "Optimizer"}}, False),
        ({"trainer": {"command": ["a"], "framework": "Torchrun"}}, False),
    ],
)
def test_ranks_measure_options_without_a_fixed_value(changes: dict[str, Any], measures: bool) -> None:
    assert planned(spec(**{"nodes": {"min": 2}} | changes)).measure_collective == measures


def test_parameter_server_is_a_separate_rank() -> None:
    output = planned(spec(nodes={"min": 3}, collective="ParameterServer"))
    assert [(r.role, r.share) for r in output.ranks] == [("worker", 48), ("worker", 48), ("server", 0)]


def test_layered_server_is_rank_0() -> None:
    output = planned(spec(nodes={"min": 3}, collective="LayeredServer"))
    assert [(r.role, r.share) for r in output.ranks] == [("server", 0), ("worker", 48), ("worker", 48)]
    assert not output.measure_collective and output.collective == "LayeredServer"


def test_ddp_has_buckets_of_its_own_size_on_all_ranks() -> None:
    output = planned(spec(nodes={"min": 3}, collective="DDP"))
    assert (output.collective, output.bucket_nbytes) == ("DDP", 25 * 2**20)
    assert not output.measure_collective and [r.share for r in output.ranks] == [32, 32, 32]


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        ({"uri": "pvc://claim/a/b.npz", "samples": 9}, f"{dlcontract.DATASET_DIR}/a/b.npz"),
        ({"uri": "file:///data/x.npz", "samples": 9}, "/data/x.npz"),
    ],
)
def test_dataset_path_in_the_pod(dataset: dict[str, Any], path: str) -> None:
    assert planned(spec(dataset=dataset)).dataset == dlcontract.DatasetRef(path=path, samples=9)


@pytest.mark.parametrize(("nodes", "minimum"), [({"min": 1, "max": 3}, 2), ({"min": 2, "max": 2}, 4), ({"min": 2}, 4)])
def test_elastic_job_may_shrink_to_the_ranks_of_its_minimum_nodes(nodes: dict[str, int], minimum: int) -> None:
    group = {"device": "a100", "nodes": 2, "ranksPerNode": 2}
    output = planned(spec(nodes=nodes, planning={"mode": "Fixed", "groups": [group]}), UNLIKE)
    assert output.min_ranks == minimum


ELASTIC = {"command": ["torchrun", "train.py"], "framework": "Torchrun", "elastic": True}


@pytest.mark.parametrize(
    ("changes", "elastic"),
    [
        ({"nodes": {"min": 1, "max": 3}, "trainer": ELASTIC}, True),
        ({"nodes": {"max": 3}, "trainer": ELASTIC}, True),
        ({"nodes": {"min": 1}, "trainer": ELASTIC}, False),
        ({"nodes": {"min": 3, "max": 3}, "trainer": ELASTIC}, False),
        ({"nodes": {"min": 1, "max": 3}, "checkpoint": {"enabled": False}, "trainer": ELASTIC}, False),
        ({"nodes": {"min": 1, "max": 3}}, False),
        ({"nodes": {"min": 1, "max": 3}, "trainer": {"command": ["x"], "framework": "MPI"}}, False),
    ],
)
def test_script_for_torchrun_is_elastic_if_it_says_so_and_has_both_limits(
    changes: dict[str, Any], elastic: bool
) -> None:
    script: dict[str, Any] = {"trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun"}, **changes}
    asked = DLJobSpec.model_validate(script)
    decision = plan(planner_request("job", asked), THREE, {})
    assert isinstance(decision, Decision)
    output = trainer_plan("job", "team", "uid-1", asked, decision, 1, 1, "job", "cluster.local")
    assert output.model.elastic is elastic and not output.model.resumes
    assert (len(output.ranks), output.min_ranks) == ((3, 1) if elastic else (asked.nodes.min,) * 2)
    assert any("spec.trainer.elastic" in name for name, _ in dlcontract.newer_parts(output)) is elastic


def test_segments_are_larger_on_one_node() -> None:
    one_node, three_nodes = (planned(spec(nodes={"min": n, "max": n})).segment_nbytes for n in (1, 3))
    assert three_nodes < 64 * 2**10 < one_node


def test_status_contains_the_plan_and_other_candidates() -> None:
    decision = decided(spec(nodes={"min": 2}))
    status = plan_status(spec(), decision, 4, "abc")
    assert (status.number, status.digest, status.summary) == (4, "abc", decision.chosen.summary)
    assert (status.nodes, status.ranks) == (3, 3)
    assert status.groups[0].batch_per_rank == (32, 32, 32)
    assert [c.chosen for c in status.candidates] == [True, *[False] * (len(status.candidates) - 1)]
    assert {r.summary for r in status.rejected} == {r.summary for r in decision.refusals}
    assert status.predicted.step_seconds < status.predicted.step_seconds_p90
    assert status.predicted.bottleneck and status.links == decision.links and "between nodes" in str(status.links)
    long = plan_status(spec(), replace(decision, links="n" * 5000), 4, "abc")
    assert PlanStatus.model_validate(long.manifest()) == long, "names of device types do not make it invalid"
    assert plan_status(spec(), replace(decision, links=None), 4, "abc").links is None
    for figure in (status.predicted.step_seconds, status.predicted.total_seconds, status.predicted.samples_per_second):
        assert figure == float(f"{figure:.4g}"), "the table has a column of limited width"
    assert PlanStatus.model_validate(status.manifest()) == status
