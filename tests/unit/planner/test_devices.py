"""Tests of the devices of a plan: a job uses one kind of device, and NCCL alone reduces gradients on GPUs."""

from dataclasses import replace

import pytest

from dljob.cluster import ClusterView, Node
from dljob.planner import Choice, Decision, FixedChoice, Group, Infeasible, Request, plan
from support.planner_questions import RESNET, decided, view

GPUS = tuple(Node(f"a{i}", "NVIDIA-A100-SXM4-40GB", 4, 4, 32, 32, 2**38, is_gpu=True) for i in range(2))
AMD = tuple(Node(f"m{i}", "AMD-Instinct-MI250X", 4, 4, 32, 32, 2**38, is_gpu=True) for i in range(2))
CPUS = tuple(Node(f"c{i}", "cpu", cpu=16, free_cpu=16, free_memory_nbytes=2**36) for i in range(4))
ON_CPUS_ONLY = ("Tree", "Butterfly", "HalvingDoubling", "ParameterServer", "LayeredServer")


def wrong(request: Request, nodes: tuple[Node, ...]) -> Infeasible:
    found = plan(request, ClusterView(nodes), {})
    assert isinstance(found, Infeasible), found
    return found


@pytest.mark.parametrize("collective", ON_CPUS_ONLY)
class TestCollectivesOnGPUs:
    def test_a_spec_that_names_gpus_is_refused(self, collective: str) -> None:
        found = wrong(replace(RESNET, collective=collective, devices=("a100",)), GPUS + CPUS)
        assert (found.reason, found.field, found.transient) == ("CollectiveNotOnGPUs", "spec.collective", False)
        fixed = replace(RESNET, collective=collective, fixed=(FixedChoice("a100", 1, 4),))
        assert wrong(fixed, GPUS).reason == "CollectiveNotOnGPUs"

    def test_a_cluster_with_gpus_only_has_no_plan(self, collective: str) -> None:
        assert wrong(replace(RESNET, collective=collective), GPUS).reason == "CollectiveNotOnGPUs"

    def test_other_jobs_use_cpus_and_say_why(self, collective: str) -> None:
        found = decided(replace(RESNET, collective=collective), ClusterView(GPUS + CPUS))
        assert not any(group.is_gpu for choice in found.candidates for group in choice.groups)
        line = next(r for r in found.refusals if "NVIDIA-A100" in r.summary)
        assert "spec.collective" in line.reason
        assert "Auto or Torch" in line.reason


@pytest.mark.parametrize("collective", [None, "Torch"])
def test_nccl_runs_on_gpus(collective: str | None) -> None:
    found = decided(replace(RESNET, collective=collective), ClusterView(GPUS + CPUS))
    assert found.chosen.groups[0].is_gpu
    assert {c.collective for c in found.candidates if c.groups[0].is_gpu} == {"Torch"}


def test_ddp_runs_on_gpus_in_larger_buckets() -> None:
    """Fewer messages take less time, but a larger last bucket is reduced after the backward pass."""
    asked, nccl = (decided(replace(RESNET, collective=each), ClusterView(GPUS)).chosen for each in ("DDP", None))
    assert asked.groups == nccl.groups and "DDP (NCCL)" in asked.summary
    assert asked.prediction.communication_s != nccl.prediction.communication_s


@pytest.mark.parametrize("collective", ["Ring", "MPI"])
def test_names_of_what_nccl_does_have_its_price(collective: str) -> None:
    asked, nccl = (decided(replace(RESNET, collective=each), ClusterView(GPUS)).chosen for each in (collective, None))
    assert asked.prediction.step_s == nccl.prediction.step_s
    assert f"{collective} (NCCL)" in asked.summary


def test_compressed_gradients_need_cpus() -> None:
    found = wrong(replace(RESNET, collective="Ring", compressed=True), GPUS)
    assert (found.reason, found.field) == ("CollectiveNotOnGPUs", "spec.gradientCompression")


def test_asynchronous_training_and_scripts_that_reduce_gradients_run_on_gpus() -> None:
    """An asynchronous server exchanges messages through main memory, and what an MPI program does is its own."""
    server = replace(RESNET, collective="ParameterServer", synchronization="Asynchronous", nodes_min=2)
    assert decided(server, ClusterView(GPUS)).chosen.groups[0].is_gpu
    script = replace(RESNET, collective="MPI", reduced_by_script=True)
    assert decided(script, ClusterView(GPUS)).chosen.groups[0].is_gpu


def test_an_asynchronous_server_on_gpus_sends_through_main_memory() -> None:
    """A round of the three workers carries 2 V bytes for each of them over PCIe and main memory, not over NVLink."""
    node = ClusterView((Node("a", "NVIDIA-A100-SXM4-40GB", 4, 4, 32, 32, 2**38, is_gpu=True),))
    asked = replace(
        RESNET, collective="ParameterServer", synchronization="Asynchronous", fixed=(FixedChoice("a100", 1, 4),)
    )
    found = decided(asked, node).chosen.prediction
    gradient = 4 * 25.5e6
    assert found.communication_s > 2 * 3 * gradient / 32e9 - found.compute_s
    assert found.communication_s > 2 * gradient / 32e9


class TestOneKindOfDevice:
    @pytest.mark.parametrize(
        "devices",
        [
            ("NVIDIA-A100-SXM4-40GB", "AMD-Instinct-MI250X"),
            ("NVIDIA-A100-SXM4-40GB", "cpu"),
            ("AMD-Instinct-MI250X", "cpu"),
        ],
    )
    @pytest.mark.parametrize("missing", [(), ("model",)])
    def test_groups_of_two_kinds_are_refused(self, devices: tuple[str, ...], missing: tuple[str, ...]) -> None:
        fixed = tuple(FixedChoice(device, 1) for device in devices)
        found = wrong(replace(RESNET, fixed=fixed, missing=missing), GPUS + AMD + CPUS)
        assert (found.reason, found.field, found.transient) == ("MixedDevices", "spec.planning.groups", False)

    def test_no_candidate_mixes_vendors(self) -> None:
        view = ClusterView(GPUS + AMD + CPUS)
        found = plan(replace(RESNET, global_batch=4096, candidates_kept=100), view, {})
        assert isinstance(found, Decision)
        kinds = [{g.device for g in choice.groups} for choice in found.candidates]
        assert {"NVIDIA-A100-SXM4-40GB"} in kinds
        assert {"AMD-Instinct-MI250X"} in kinds
        assert all(len(each) == 1 for each in kinds)


def test_a_node_with_much_memory_takes_no_plan_from_the_others() -> None:
    """Fixed bug: beside it, nodes with less than half of its memory were used only together with the smallest node."""
    request = Request(
        job="j", global_batch=96, total_steps=100, parameters=300_000_000, flops_per_sample=1e9,
        activation_nbytes_per_sample=1_000_000, nodes_min=3,
    )  # fmt: skip
    nodes = [{"count": 3, "cpu": 4, "memory": "16Gi"}, {"cpu": 4, "memory": "2Gi"}]
    before = decided(request, view(*nodes)).chosen
    after = decided(request, view(*nodes, {"cpu": 4, "memory": "64Gi"})).chosen
    assert after.prediction.total_s <= before.prediction.total_s


class TestMainMemoryOfGPUNodes:
    """Regression: plans had more ranks on a GPU node than fit into its main memory, so that pods waited for ever."""

    @pytest.mark.parametrize("free_gibibytes", [3, 6, 11, 24])
    def test_pods_fit_into_the_free_main_memory(self, free_gibibytes: int) -> None:
        nodes = tuple(replace(node, free_memory_nbytes=free_gibibytes * 2**30) for node in GPUS)
        found = decided(RESNET, ClusterView(nodes))
        assert all(each.prediction.host_memory_nbytes <= free_gibibytes * 2**30 for each in found.candidates)

    def test_nodes_without_memory_for_one_rank_are_named(self) -> None:
        found = wrong(RESNET, self.with_free(2, 2))
        assert (found.reason, found.field, found.transient) == ("DoesNotFit", "spec.resources.memory", True)
        assert "found 2 GiB of free main memory on GPU nodes; expected at least 2.82 GiB" in found.message

    def test_fixed_ranks_that_do_not_fit_are_named(self) -> None:
        found = wrong(replace(RESNET, fixed=(FixedChoice("a100", 2, 4),)), self.with_free(24, 8))
        assert (found.reason, found.field) == ("DoesNotFit", "spec.planning.groups[0].ranksPerNode")
        assert "found 8 GiB of free main memory" in found.message and "a pod with 4 ranks requests" in found.message
        assert decided(replace(RESNET, fixed=(FixedChoice("a100", 1, 4),)), ClusterView(self.with_free(24, 8)))

    def test_nodes_with_little_memory_get_fewer_ranks_and_the_others_all(self) -> None:
        found = decided(replace(RESNET, global_batch=512), ClusterView(self.with_free(24, 8)))
        groups = found.chosen.groups
        assert sum(g.nodes * g.ranks_per_node for g in groups) >= 4
        line = next(r for r in found.refusals if "of main memory" in r.reason)
        assert "4 x NVIDIA-A100-SXM4-40GB on each of 2 nodes" in line.summary and "8 GiB are free" in line.reason

    def test_no_suggestion_needs_more_main_memory(self) -> None:
        asked = replace(RESNET, asks_unsupported=True)
        found = decided(asked, ClusterView(self.with_free(7, 7)))
        assert found.chosen.groups[0].ranks_per_node == 2
        assert "4 ranks each" not in (found.next_measurement or "") and not any(
            "4 ranks" in each.summary for each in found.unsupported
        )

    def test_users_figure_counts_instead(self) -> None:
        asked = replace(RESNET, memory_per_pod_nbytes=2**30)
        found = decided(asked, ClusterView(self.with_free(2, 2)))
        assert found.chosen.groups[0].is_gpu
        assert "spec.resources.memory: found 1 GiB for each pod; expected 10.9 GiB" in (found.warning or "")

    def test_data_loaders_count(self) -> None:
        """Samples of 150 MB: each loader holds two batches."""
        asked = replace(RESNET, sample_nbytes=150_000_000, global_batch=64)
        found = decided(asked, ClusterView(self.with_free(40, 40)))
        assert all(each.prediction.host_memory_nbytes <= 40 * 2**30 for each in found.candidates)

    def test_pods_of_mixed_groups_fit_on_the_nodes_of_each_group(self) -> None:
        """Each group's pods request what they need, and not what the largest pods of the plan need."""
        big = replace(GPUS[0], devices=8, free_devices=8, free_memory_nbytes=64 * 2**30)
        small = [Node(f"t{i}", "Tesla-T4", 1, 1, 8, 8, 6 * 2**30, is_gpu=True) for i in range(4)]
        asked = replace(RESNET, global_batch=2048, total_steps=100_000)
        found = decided(asked, ClusterView((big, *small)))
        for choice in found.candidates:
            for group, nbytes in self.pods(choice):
                assert nbytes <= (6 if "T4" in group.device else 64) * 2**30, choice.summary
        fixed = replace(asked, fixed=(FixedChoice("a100", 1, 8), FixedChoice("t4", 2, 1)))
        [(_, of_big), (_, of_small)] = self.pods(decided(fixed, ClusterView((big, *small))).chosen)
        assert of_small < 6 * 2**30 < of_big
        less = [replace(node, free_memory_nbytes=of_small // 2) for node in small]
        refused = wrong(fixed, (big, *less))
        assert refused.reason == "DoesNotFit" and "of main memory" in refused.message
        assert decided(replace(fixed, memory_per_pod_nbytes=of_small // 2), ClusterView((big, *less)))

    def test_pods_of_mixed_groups_fit_on_cpu_nodes(self) -> None:
        fast = Node("f", "fast", cpu=16, free_cpu=16, free_memory_nbytes=64 * 2**30)
        slow = [Node(f"s{i}", "slow", cpu=4, free_cpu=4, free_memory_nbytes=3 * 2**30) for i in range(3)]
        asked = replace(RESNET, model="digits-cnn", dataset="digits", global_batch=4096)
        found = decided(asked, ClusterView((fast, *slow)))
        for choice in found.candidates:
            for group, nbytes in self.pods(choice):
                assert nbytes <= (3 if group.device == "slow" else 64) * 2**30, choice.summary

    @staticmethod
    def pods(choice: Choice) -> list[tuple[Group, int]]:
        """Return each group of a plan with the main memory in bytes that one of its pods requests."""
        assert max(choice.pods_nbytes) == choice.prediction.host_memory_nbytes
        return list(zip(choice.groups, choice.pods_nbytes, strict=True))

    @staticmethod
    def with_free(*gibibytes: int) -> tuple[Node, ...]:
        return tuple(replace(node, free_memory_nbytes=n * 2**30) for node, n in zip(GPUS, gibibytes, strict=True))
