"""Translation of a DLJob into a planner request, and of the decision into status and trainer plan."""

from typing import Any

import pytest

import dlcontract
from dljob.api import DLJobSpec, PlanStatus
from dljob.cluster import ClusterView, cluster_view
from dljob.job.identity import profile_key
from dljob.job.plan_status import plan_status
from dljob.job.question import planner_request, total_steps
from dljob.job.trainer_plan import trainer_plan
from dljob.planner import Decision, FixedChoice, plan

BASE: dict[str, Any] = {
    "model": {"name": "digits-cnn"},
    "dataset": {"name": "digits"},
    "globalBatchSize": 96,
    "epochs": 25,
}
APART = {"synchronization": "StaleSynchronous", "stalenessBound": 3}
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


def decided(wanted: DLJobSpec, view: ClusterView = THREE) -> Decision:
    found = plan(planner_request("job", wanted), view, {})
    assert isinstance(found, Decision), found
    return found


def planned(wanted: DLJobSpec, view: ClusterView = THREE) -> dlcontract.Plan:
    return trainer_plan("job", "team", "uid-1", wanted, decided(wanted, view), 3, 2, "job", "cluster.local")


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 25 * 15),  # 1437 / 96 is 14.97: the last batch of an epoch is a partial one
        ({"globalBatchSize": 1437}, 25),
        ({"globalBatchSize": 1438}, 25),
        ({"globalBatchSize": 1436}, 50),
        ({"epochs": None, "steps": 7}, 7),
        ({"dataset": {"uri": "file:///data.npz", "samples": 100}, "globalBatchSize": 30, "epochs": 2}, 8),
        ({"model": {"name": "mlp"}, "dataset": {"name": "iris"}, "globalBatchSize": 32, "epochs": 1}, 4),
    ],
)
def test_steps_of_a_training(changes: dict[str, Any], steps: int) -> None:
    assert total_steps(spec(**changes)) == steps


def test_the_question() -> None:
    asked = planner_request(
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
    assert (asked.job, asked.model, asked.dataset, asked.profile) == ("job", "digits-cnn", "digits", "digits-cnn")
    assert (asked.global_batch, asked.total_steps, asked.optimizer) == (96, 375, "Adam")
    assert (asked.nodes_min, asked.nodes_max, asked.devices) == (2, 4, ("t4",))
    assert (asked.minimize, asked.deadline_s, asked.collective) == ("Energy", 5400.0, "Tree")
    assert (asked.uneven, asked.candidates_kept) == (False, 7)
    assert (asked.node_selector, asked.tolerations) == ({"a": "b"}, ({"operator": "Exists"},))
    assert (asked.cpu_per_pod, asked.cpu_limit_per_pod, asked.memory_per_pod_nbytes) == (0.5, 2.0, 2**31)


def test_fixed_groups_and_hints() -> None:
    group = {"device": "cpu", "nodes": 2, "ranksPerNode": 2, "batchPerRank": 24}
    asked = planner_request("job", spec(planning={"mode": "Fixed", "groups": [group]}))
    assert asked.fixed == (FixedChoice("cpu", 2, 2, 24),)
    hints = {"parameters": 10, "flopsPerSample": 1e6, "activationBytesPerSample": 5}
    asked = planner_request("job", spec(model={"hints": hints}, trainer={"command": ["python", "t.py"]}))
    assert (asked.model, asked.parameters, asked.flops_per_sample) == (None, 10, 1e6)
    assert asked.activation_nbytes_per_sample == 5
    asked = planner_request("job", spec(model={"hints": {"like": "GPT-2-XL"}}, trainer={"command": ["python", "t.py"]}))
    assert (asked.model, asked.like, asked.parameters, asked.flops_per_sample) == (None, "GPT-2-XL", None, None)


def test_a_torchrun_script_gets_equal_shares_and_its_own_collective() -> None:
    wanted = spec(trainer={"command": ["python", "t.py"], "framework": "Torchrun"}, nodes={"min": 3})
    asked = planner_request("job", wanted)
    assert (asked.collective, asked.uneven) == ("Torch", False)
    todo = planned(wanted)
    assert not todo.rebalance
    assert todo.model == dlcontract.ModelRef(name="digits-cnn", command=("python", "t.py"), framework="Torchrun")


def test_options_of_training_reach_the_plan() -> None:
    hints = {"parameters": 10, "flopsPerSample": 1e6}
    todo = planned(spec(model={"hints": hints, "syncBatchNorm": True}, trainer={"command": ["python", "t.py"]}))
    assert planned(spec(parallelism={"strategy": "Optimizer"})).parallelism == "Optimizer"
    assert planned(spec(parallelism={"strategy": "Optimizer"})).collective == "Ring"
    assert planner_request("job", spec(parallelism={"strategy": "Auto"})).strategy == "Auto"
    own = spec(parallelism={"strategy": "Auto"}, model={"hints": hints}, trainer={"command": ["python", "t.py"]})
    assert planner_request("job", own).strategy == "Data", "whether its optimizer can be shared out is not known"
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
        parallelism={"strategy": "Auto"}, resources={"memory": "1Gi"},
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
    stale = planned(spec(parallelism=APART))
    assert (stale.synchronization, stale.staleness_bound, stale.collective) == (
        "StaleSynchronous",
        3,
        "ParameterServer",
    )
    assert sum(rank.share == 0 for rank in stale.ranks) == 1 and not stale.rebalance
    assert "ParameterServer within 3 steps" in decided(spec(parallelism=APART)).chosen.summary
    alone = plan(planner_request("job", spec(parallelism=APART, nodes={"max": 1})), THREE, {})
    assert not isinstance(alone, Decision), "a worker and a server are two"
    scaling = {"rule": "AdaScale", "baseBatchSize": 16}
    optimizer = planned(spec(optimizer={"learningRateScaling": scaling})).optimizer
    assert (optimizer.scaling, optimizer.base_batch) == ("AdaScale", 16)
    assert planned(spec(optimizer={"findLearningRate": True})).optimizer.find_rate
    assert planned(spec(runPolicy={"compareParametersSteps": 7})).compare_steps == 7
    assert todo.model.sync_batch_norm and not planned(spec()).model.sync_batch_norm


def test_what_is_learned_is_kept_apart() -> None:
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


def test_the_plan_as_the_trainer_reads_it() -> None:
    todo = planned(spec(nodes={"min": 3}, collective="Ring", checkpoint={"interval": "5s", "keep": 2}))
    assert [(r.rank, r.pod, r.host, r.local_rank, r.share, r.gpu) for r in todo.ranks] == [
        (i, f"job-cpu-{i}", f"job-cpu-{i}.job.team.svc.cluster.local", 0, 32, False) for i in range(3)
    ]
    assert (todo.job, todo.namespace, todo.uid, todo.number, todo.term) == ("job", "team", "uid-1", 3, 2)
    assert (todo.collective, todo.min_ranks, todo.epochs, todo.steps) == ("Ring", 3, 25, None)
    assert todo.dataset == dlcontract.DatasetRef(name="digits", samples=1437)
    assert todo.checkpoint == dlcontract.CheckpointRef(enabled=True, interval_s=5.0, keep=2)
    assert planned(spec(nodes={"min": 3})).checkpoint == dlcontract.CheckpointRef(choose_interval=True)
    assert todo.expected.step_s > 0
    assert todo.expected.total_s == pytest.approx(375 * todo.expected.step_s)
    assert todo.rebalance and not todo.measure_collective
    assert dlcontract.Plan.parse(todo.to_json()) == todo


def test_ranks_are_contiguous_by_group_then_node_then_device() -> None:
    groups = [
        {"device": "a100", "nodes": 2, "ranksPerNode": 2, "batchPerRank": 20},
        {"device": "t4", "nodes": 1, "ranksPerNode": 2, "batchPerRank": 8},
    ]
    todo = planned(spec(planning={"mode": "Fixed", "groups": groups}), UNLIKE)
    assert [(r.pod, r.local_rank, r.share, r.gpu) for r in todo.ranks] == [
        ("job-a100-sxm4-40gb-0", 0, 20, True),
        ("job-a100-sxm4-40gb-0", 1, 20, True),
        ("job-a100-sxm4-40gb-1", 0, 20, True),
        ("job-a100-sxm4-40gb-1", 1, 20, True),
        ("job-t4-0", 0, 8, True),
        ("job-t4-0", 1, 8, True),
    ]
    assert not todo.rebalance, "the user said how many samples"


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
def test_ranks_measure_what_the_user_leaves_open(changes: dict[str, Any], measures: bool) -> None:
    assert planned(spec(**{"nodes": {"min": 2}} | changes)).measure_collective == measures


def test_a_parameter_server_is_a_separate_rank() -> None:
    todo = planned(spec(nodes={"min": 3}, collective="ParameterServer"))
    assert [(r.role, r.share) for r in todo.ranks] == [("worker", 48), ("worker", 48), ("server", 0)]


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        ({"uri": "pvc://claim/a/b.npz", "samples": 9}, f"{dlcontract.DATASET_DIR}/a/b.npz"),
        ({"uri": "file:///data/x.npz", "samples": 9}, "/data/x.npz"),
    ],
)
def test_where_the_data_is_in_the_pod(dataset: dict[str, Any], path: str) -> None:
    assert planned(spec(dataset=dataset)).dataset == dlcontract.DatasetRef(path=path, samples=9)


@pytest.mark.parametrize(("nodes", "least"), [({"min": 1, "max": 3}, 2), ({"min": 2, "max": 2}, 4), ({"min": 2}, 4)])
def test_an_elastic_job_may_continue_with_the_ranks_of_its_minimum_nodes(nodes: dict[str, int], least: int) -> None:
    group = {"device": "a100", "nodes": 2, "ranksPerNode": 2}
    todo = planned(spec(nodes=nodes, planning={"mode": "Fixed", "groups": [group]}), UNLIKE)
    assert todo.min_ranks == least


def test_a_job_on_one_node_uses_large_segments_a_spread_one_small_ones() -> None:
    alone, spread = (planned(spec(nodes={"min": n, "max": n})).segment_nbytes for n in (1, 3))
    assert spread < 64 * 2**10 < alone


def test_the_status_shows_the_plan_and_other_candidates() -> None:
    decision = decided(spec(nodes={"min": 2}))
    status = plan_status(spec(), decision, 4, "abc")
    assert (status.number, status.digest, status.summary) == (4, "abc", decision.chosen.summary)
    assert (status.nodes, status.ranks) == (3, 3)
    assert status.groups[0].batch_per_rank == (32, 32, 32)
    assert [c.chosen for c in status.candidates] == [True, *[False] * (len(status.candidates) - 1)]
    assert {r.summary for r in status.rejected} == {r.summary for r in decision.refusals}
    assert status.predicted.step_seconds < status.predicted.step_seconds_p90
    assert status.predicted.bottleneck
    for figure in (status.predicted.step_seconds, status.predicted.total_seconds, status.predicted.samples_per_second):
        assert figure == float(f"{figure:.4g}"), "people read it in a column"
    assert PlanStatus.model_validate(status.manifest()) == status


@pytest.mark.parametrize(
    ("overrides", "grace_s"),
    [
        ([], 30.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": 300}}], 300.0),
        ([{"manager": "a", "spec": {"terminationGracePeriodSeconds": 300}}, {"manager": "b", "spec": {}}], 300.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": "soon"}}], 30.0),
    ],
)
def test_the_last_checkpoint_has_the_time_that_the_pod_has(overrides: list[dict[str, Any]], grace_s: float) -> None:
    wanted = spec(runPolicy={"terminationGracePeriodSeconds": 30}, podTemplateOverrides=overrides)
    assert planned(wanted).grace_s == grace_s
