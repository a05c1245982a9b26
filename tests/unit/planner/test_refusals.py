"""Tests of rejections, which name the reason and the remedy, and of names and figures in texts."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster import ClusterView, Node
from dljob.planner import Decision, FixedChoice, Infeasible, Request, plan
from dljob.planner.candidates.pools import wanted
from dljob.planner.types.storage import Storage
from dljob.planner.types.texts import duration, duration_at_least, gibibytes, group_names, joules, plain, rate
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, rejected, view

GPT2_XL = Request(job="j", global_batch=64, total_steps=100, profile="x", like="GPT-2-XL", optimizer="AdamW")
SERVER: dict[str, Any] = {"synchronization": "Asynchronous", "collective": "ParameterServer"}


class TestRejections:
    @pytest.mark.parametrize(
        ("change", "cluster", "reason", "field", "message", "transient"),
        [
            (
                {"devices": ("h100",)},
                THREE,
                "NoSuchDevice",
                "spec.devices",
                "found the device types h100, which no node has; expected a device type of the cluster (it has cpu",
                True,
            ),
            ({}, ClusterView(), "TooFewNodes", "spec.nodes.min", "found 0 nodes", True),
            (
                {"nodes_min": 5},
                THREE,
                "TooFewNodes",
                "spec.nodes.min",
                "found 3 nodes that the job can use; expected at least 5: add 2 nodes with any device, or lower "
                "nodes.min to 3",
                True,
            ),
            (
                {"nodes_min": 4, "devices": ("cpu",), "node_selector": {"zone": "a"}},
                view({"count": 3, "cpu": 2, "memory": "4Gi", "labels": {"zone": "a"}}),
                "TooFewNodes",
                "spec.nodes.min",
                "add 1 node with cpu, or lower nodes.min to 3, or add device types to spec.devices, or remove labels "
                "from scheduling.nodeSelector",
                True,
            ),
            (
                {"nodes_min": 4},
                view({"count": 3, "cpu": 2, "memory": "4Gi"}, {"count": 2, "device": T4, "devices": 1, "cpu": 8}),
                "TooFewNodes",
                "spec.nodes.min",
                "found 3 with CPUs and 2 with NVIDIA GPUs, of the nodes that the job can use; expected at least 4 nodes "
                "with devices of one kind, because a job cannot use several kinds: add 1 node with CPUs, or lower "
                "nodes.min to 3",
                True,
            ),
            (
                {"global_batch": 2, "nodes_min": 3},
                THREE,
                "BatchTooSmall",
                "spec.globalBatchSize",
                "found a global batch of 2 samples",
                False,
            ),
            (
                {"node_selector": {"zone": "b"}},
                THREE,
                "TooFewNodes",
                "spec.scheduling.nodeSelector",
                "found no node with the labels zone=b; expected at least 1",
                True,
            ),
            ({"cpu_per_pod": 3.0}, THREE, "TooFewNodes", "spec.resources.cpu", "found 3 CPUs for each pod", True),
            (
                {"memory_per_pod_nbytes": 2**34},
                THREE,
                "TooFewNodes",
                "spec.resources.memory",
                "found 16 GiB of memory for each pod; expected at most 4 GiB",
                True,
            ),
            ({"model": "vgg"}, THREE, "BadWorkload", "spec.model", "model: found 'vgg'; expected one of", False),
            ({"dataset": "iris"}, THREE, "BadWorkload", "spec.model", "does not fit dataset iris", False),
            (
                {"model": None},
                THREE,
                "BadWorkload",
                "spec.model",
                "expected spec.model.name (a built-in model) or spec.model.hints",
                False,
            ),
        ],
    )
    def test_rejection_names_reason_and_field(
        self, change: dict[str, Any], cluster: ClusterView, reason: str, field: str, message: str, transient: bool
    ) -> None:
        found = rejected(replace(DIGITS, **change), cluster)
        assert (found.reason, found.field, found.transient) == (reason, field, transient)
        assert message in found.message

    def test_model_larger_than_memory_is_rejected(self) -> None:
        huge = Request(job="j", global_batch=8, total_steps=1, parameters=10**11, flops_per_sample=1e15)
        found = rejected(huge, view({"device": T4, "devices": 2, "cpu": 8}, {"device": A100, "cpu": 8}))
        assert (found.reason, found.field) == ("DoesNotFit", "spec.model.hints.parameters")
        assert "Tesla-T4: does not fit" in found.message
        assert f"{A100}: does not fit" in found.message
        assert "a rank has 14.4 GiB" in found.message

    @pytest.mark.parametrize(
        ("strategy", "begin"),
        [
            ("Auto", "needs 19.3 GiB to train on one sample, even without the optimizer state of 12.8 GiB"),
            ("Data", "needs 32.1 GiB to train on one sample: optimizer state 12.8 GiB"),
        ],
    )
    def test_memory_of_a_model_that_does_not_fit_is_named_by_size(self, strategy: Any, begin: str) -> None:
        """Fixed bug, with GPT-2 XL: 'found activations of 4.7 GiB; expected at most 16 GiB'."""
        found = rejected(
            replace(GPT2_XL, strategy=strategy), view({"device": T4, "devices": 1, "cpu": 8, "memory": "64Gi"})
        )
        assert (found.reason, found.field) == ("DoesNotFit", "spec.model.hints.like")
        words = (begin, "parameters 6.", "gradients 6.", "activations 5.", "CUDA 978 MiB", "at most 14.4 GiB")
        places = [found.message.index(word) for word in words]
        assert places == sorted(places)
        assert "smaller model" in found.message and "parallelism.strategy" in found.message

    @pytest.mark.parametrize(("precision", "copies"), [("FP32", False), ("BF16", True), (None, False)])
    def test_memory_of_one_sample_is_that_in_the_precision_of_the_job(self, precision: Any, copies: bool) -> None:
        """Regression: in bfloat16, the message left out the 16-bit copies of the parameters, and contradicted others."""
        huge = Request(
            job="j", global_batch=64, total_steps=10, parameters=7 * 10**9, flops_per_sample=1e14, precision=precision,
            activation_nbytes_per_sample=10**9, checkpointed_nbytes_per_sample=10**8, recomputation="Auto",
        )  # fmt: skip
        found = rejected(huge, view({"count": 4, "device": A100, "devices": 8, "cpu": 96, "memory": "1000Gi"}))
        assert ("16-bit copies of parameters 14" in found.message) == copies
        assert "activations" not in found.message.split("; expected")[0], "with activation checkpointing, under 1 %"

    def test_sets_of_nodes_too_small_for_the_batch_are_listed(self) -> None:
        request = replace(RESNET, global_batch=4096)
        decision = decided(request, view({"count": 4, "device": T4, "devices": 4, "cpu": 16}))
        (line,) = [r for r in decision.refusals if "does not fit" in r.reason]
        assert line.summary == "up to 8 x Tesla-T4"
        assert sum(len(g.shares) for g in decision.chosen.groups) >= 8

    def test_busy_and_tainted_nodes_are_excluded(self) -> None:
        nodes = (
            Node("a", T4, free_devices=0, is_gpu=True),
            Node("b", "cpu", taints=(("dedicated", "x", "NoSchedule"),)),
            Node("c", "cpu", taints=(("slow", "", "PreferNoSchedule"),)),
        )
        decision = decided(DIGITS, ClusterView(nodes))
        lines = {r.summary: r.reason for r in decision.refusals}
        assert lines["1 x Tesla-T4"] == "no free device"
        assert lines["1 x cpu"] == "taint dedicated=x:NoSchedule is not tolerated"
        found = rejected(replace(DIGITS, devices=("t4",)), ClusterView(nodes))
        assert (found.reason, found.transient) == ("DeviceBusy", True)
        assert "nodes are free (" in found.message  # One node is the minimum, so there is no advice to lower it.

    @pytest.mark.parametrize(
        ("toleration", "tolerated"),
        [
            ({"key": "dedicated", "operator": "Equal", "value": "x", "effect": "NoSchedule"}, True),
            ({"key": "dedicated", "value": "x"}, True),
            ({"key": "dedicated", "operator": "Exists"}, True),
            ({"operator": "Exists"}, True),
            ({"key": "dedicated", "value": "y"}, False),
            ({"key": "other", "operator": "Exists"}, False),
            ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ],
    )
    def test_tolerations_match_taints(self, toleration: dict[str, str], tolerated: bool) -> None:
        nodes = ClusterView((Node("b", "cpu", taints=(("dedicated", "x", "NoSchedule"),)),))
        found = plan(replace(DIGITS, tolerations=(toleration,)), nodes, {})
        assert isinstance(found, Decision) == tolerated

    @pytest.mark.parametrize("limited_first", [True, False])
    def test_taint_that_is_tolerated_for_a_time_only_excludes_the_node(self, limited_first: bool) -> None:
        """Fixed bug: Kubernetes evicted the pods of such a plan after this time, again and again."""
        limited: Any = {"key": "repair", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        both: Any = (limited, {"operator": "Exists"})
        nodes = ClusterView((Node("b", "cpu", taints=(("repair", "", "NoExecute"),)),))
        found = plan(replace(DIGITS, tolerations=both if limited_first else both[::-1]), nodes, {})
        assert isinstance(found, Decision) != limited_first, (
            "the first toleration that matches counts, as in Kubernetes"
        )
        if isinstance(found, Infeasible):
            assert "taint repair:NoExecute is not tolerated for longer than 300 s" in found.message

    @pytest.mark.parametrize(
        ("change", "cluster"),
        [
            pytest.param({"nodes_max": 1}, view({"cpu": 4, "memory": "16Gi"}), id="several CPUs"),
            pytest.param({"nodes_max": 1}, view({"device": A100, "devices": 2, "cpu": 8}), id="several GPUs"),
            pytest.param({"nodes_max": 1, "fixed": (FixedChoice("cpu", 1, 2),)}, THREE, id="fixed ranks"),
            pytest.param({"nodes_max": 1, "fixed": (FixedChoice("cpu", 2, 1),)}, THREE, id="fixed nodes"),
        ],
    )
    def test_server_and_worker_may_share_a_node(self, change: dict[str, Any], cluster: ClusterView) -> None:
        chosen = decided(replace(DIGITS, **SERVER, **change), cluster).chosen
        assert sum(len(group.shares) for group in chosen.groups) >= 2

    @pytest.mark.parametrize(
        ("larger", "why"),
        [
            ({"taints": (("dedicated", "x", "NoSchedule"),)}, "taint dedicated=x:NoSchedule is not tolerated"),
            ({"labels": {"zone": "b"}}, "nodeSelector zone=a does not match"),
            ({"left_out": "left out because of repeated faults"}, "left out because of repeated faults"),
            ({"storage_nbytes": 2**30}, "it has 1 GiB of storage, but the data needs 8 GiB (dataset.size)"),
        ],
        ids=["taint", "label", "faults", "storage"],
    )
    def test_most_cpus_are_those_of_a_node_that_the_job_may_use(self, larger: dict[str, Any], why: str) -> None:
        own = Node("a", "cpu", cpu=4.0, free_cpu=1.0, labels={"zone": "a"})
        cluster = ClusterView((own, Node("b", "cpu", cpu=64.0, free_cpu=64.0, **{"labels": {"zone": "a"}, **larger})))
        request = replace(DIGITS, cpu_per_pod=8.0, node_selector={"zone": "a"}, storage=Storage(2**33, None))
        found = rejected(request, cluster)
        assert found.field == "spec.resources.cpu" and "expected at most 4," in found.message
        assert why in found.message
        none = rejected(request, ClusterView(cluster.nodes[1:]))
        assert none.field != "spec.resources.cpu", "no node that the job may use"

    @pytest.mark.parametrize("device", ["cpu", T4])
    def test_a_node_that_reports_no_cpus_is_left_out(self, device: str) -> None:
        """Fixed bug: one such node, such as a new one, kept all jobs from being planned (a division by zero)."""
        empty = Node("new", device, cpu=0.0, free_cpu=0.0, is_gpu=device == T4)
        found = decided(DIGITS, ClusterView((*THREE.nodes, empty)))
        assert (f"1 x {device}", "it reports no CPUs") in [(each.summary, each.reason) for each in found.refusals]
        assert "it reports no CPUs" in rejected(DIGITS, ClusterView((empty,))).message

    @pytest.mark.parametrize("node", [{"cpu": 1}, {"device": T4, "cpu": 8}], ids=["one CPU", "one GPU"])
    def test_a_node_for_one_rank_has_no_room_for_server_and_worker(self, node: dict[str, Any]) -> None:
        cluster = view({"count": 3, "memory": "16Gi", **node})
        found = rejected(replace(DIGITS, **SERVER, nodes_max=1), cluster)
        assert (found.reason, found.field) == ("TooFewNodes", "spec.nodes.max")
        assert decided(replace(DIGITS, **SERVER, nodes_max=2), cluster)


class TestNames:
    @pytest.mark.parametrize(
        ("device", "name", "matches"),
        [
            (A100, "a100", True),
            (A100, "A100-SXM4", True),
            (A100, "a100-sxm4-40gb", True),
            (A100, "nvidia-a100", True),
            (A100, "a10", False),
            (A100, "a100-sxm4-80gb", False),
            (T4, "t4", True),
            ("NVIDIA-H100-80GB-HBM3", "h100", True),
            ("cpu-fast", "cpu", False),
            ("cpu-fast", "cpu-fast", True),
            ("NVIDIA-A10", "nvidia", False),
        ],
    )
    def test_device_name_matches_label(self, device: str, name: str, matches: bool) -> None:
        assert wanted(device, [name]) == matches

    def test_group_names_are_unique_and_valid(self) -> None:
        assert group_names([A100, A100, T4, "cpu", "CPU_Fast", "3090", "---", "x" * 40]) == [
            "a100-sxm4-40gb",
            "a100-sxm4-40gb-2",
            "t4",
            "cpu",
            "cpu-fast",
            "d3090",
            "d",
            "x" * 16,
        ]

    def test_figures_have_units(self) -> None:
        assert [duration(s) for s in (8.6e-5, 0.0042, 12.3, 200, 3900, 3 * 86400)] == [
            "86us",
            "4.2ms",
            "12.3s",
            "3m20s",
            "1h05m",
            "3.0d",
        ]
        assert [duration_at_least(s) for s in (0.2, 60, 2759.04, 3600, 3 * 86400 + 0.5)] == [
            "1s",
            "1m",
            "46m",
            "1h",
            "72h1s",
        ]
        assert [joules(e) for e in (12.4, 52_000, 7.2e6)] == ["12 J", "52 kJ", "2 kWh"]
        assert (rate(1.25e9), rate(3.1e6), gibibytes(1.5 * 2**30)) == ("10 Gbit/s", "24.8 Mbit/s", "1.5 GiB")
        assert (gibibytes(4), gibibytes(2**20), gibibytes(0)) == ("4 bytes", "1 MiB", "0 MiB")
        assert (plain(20_561.3, 4), plain(0.01234), gibibytes(2**41)) == ("20560", "0.0123", "2050 GiB")


class TestManyDeviceTypes:
    @staticmethod
    def labelled(count: int) -> ClusterView:
        return view(*({"device": f"host-type-{i}", "cpu": 1 + i / count, "memory": "8Gi"} for i in range(count)))

    def test_nodes_with_labels_of_their_own_are_planned_in_bounded_time_and_memory(self) -> None:
        """Regression: 2,000 nodes, each with its own device type, needed 30 GiB of memory."""
        decision = decided(replace(DIGITS, total_steps=10), self.labelled(2000))
        (line,) = [each for each in decision.refusals if "device types" in each.summary]
        assert line.summary == "1936 nodes of 1936 other device types"
        assert line.reason.startswith("not considered: found 2000 device types; expected at most 64")
        used = {group.device for group in decision.chosen.groups}
        assert used <= {f"host-type-{i}" for i in range(1936, 2000)}, "the nodes with the most CPUs"

    def test_a_job_gets_as_many_types_as_its_smallest_number_of_nodes_needs(self) -> None:
        decision = decided(replace(DIGITS, nodes_min=70), self.labelled(80))
        assert sum(group.nodes for group in decision.chosen.groups) == 70

    def test_types_that_the_user_names_count_alone(self) -> None:
        asked = replace(DIGITS, devices=("host-type-3",))
        assert {group.device for group in decided(asked, self.labelled(100)).chosen.groups} == {"host-type-3"}
