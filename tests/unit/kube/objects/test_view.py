"""Tests of the cluster view: objects are trimmed to the needed fields, and free resources are computed."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.job.observed import Fetching
from dljob.kube import cluster_view
from dljob.kube.objects import storage, trim
from dljob.kube.objects.view import devices_of, node_capacity
from dljob.scheduling import Reservation, amount, without_reserved

Json = dict[str, Any]
A100, LIMIT, CLOCK = "NVIDIA-A100-SXM4-40GB", "dljob.dev/power-limit", "dljob.dev/clock-limit"


def node(name: str = "n1", *, ready: str = "True", labels: Json | None = None, **more: Any) -> Json:
    allocatable = {"cpu": "2", "memory": "4Gi", **more.pop("allocatable", {})}
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": name, "labels": labels or {}, "annotations": more.pop("annotations", {})},
        "spec": more,
        "status": {"conditions": [condition], "allocatable": allocatable},
    }


def gpu_node(name: str, gpus: int) -> Json:
    labels = {"nvidia.com/gpu.product": A100}
    return node(name, labels=labels, allocatable={"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": str(gpus)})


def pod(on: str | None, *requests: Json, phase: str = "Running", **spec: Any) -> Json:
    containers = [{"resources": {"requests": request}} for request in requests]
    return {"spec": {"nodeName": on, "containers": containers, **spec}, "status": {"phase": phase}}


def view(nodes: list[Json], pods: list[Json] | None = None, *reservations: Reservation) -> Any:
    found = [{"metadata": {"uid": f"uid-{i}"}, **each} for i, each in enumerate(pods or [])]
    return without_reserved(cluster_view([trim.node(item) for item in nodes], found), reservations)


class TestView:
    def test_cpu_node_is_a_device(self) -> None:
        [found] = view([node(annotations={"dljob.dev/network-bandwidth": "1.25G"})]).nodes
        assert (found.device, found.devices, found.is_gpu, found.cpu) == ("cpu", 1, False, 2.0)
        assert found.link_bandwidth_Bps == 1.25e9 and found.free_memory_nbytes == 4 * 2**30
        assert found.storage_nbytes is None
        [found] = view([node(allocatable={"ephemeral-storage": "100Gi"})]).nodes
        assert found.storage_nbytes == 100 * 2**30

    def test_node_that_runs_as_many_pods_as_it_can_has_nothing_free(self) -> None:
        """Fixed bug: plans used such nodes, on which the scheduler places no pod, again and again."""
        [found] = view([node(allocatable={"pods": "3"})], [pod("n1")] * 2).nodes
        assert (found.free_cpu, found.free_memory_nbytes) == (2.0, 4 * 2**30)
        [found] = view([node(allocatable={"pods": "3"})], [pod("n1")] * 3).nodes
        assert (found.free_cpu, found.free_memory_nbytes, found.cpu) == (0.0, 0, 2.0)
        [found] = view([node(allocatable={"pods": "3"})], [pod("n1")] * 2 + [pod("n1", phase="Failed")]).nodes
        assert found.free_cpu == 2.0, "a pod that has ended takes no place"
        full = gpu_node("g", 4)
        full["status"]["allocatable"]["pods"] = "1"
        assert view([full], [pod("g")]).nodes[0].free_devices == 0

    def test_label_sets_the_device_class(self) -> None:
        [found] = view([node(labels={"dljob.dev/device": "cpu-slow"})]).nodes
        assert found.device == "cpu-slow"

    def test_gpu_node_has_its_devices(self) -> None:
        [found] = view([gpu_node("g", 4)], [pod("g", {"nvidia.com/gpu": "3"})]).nodes
        assert (found.device, found.devices, found.free_devices, found.is_gpu) == (A100, 4, 1, True)

    @pytest.mark.parametrize(
        "item",
        [
            gpu_node("g", 8),
            gpu_node("g", 0),
            node("g", labels={"dljob.dev/device": "T4"}, allocatable={"amd.com/gpu": "2"}),
            node("g", labels={"dljob.dev/device": "T4", LIMIT: "60"}, allocatable={"amd.com/gpu": "2"}),
            node(),
        ],
    )
    def test_one_function_counts_the_devices(self, item: Json) -> None:
        """The view of the node and the ledger's capacity agree with it, so another source changes only this function."""
        seen = trim.node(item)
        devices, capacity = devices_of(seen), node_capacity(seen)
        assert capacity is not None
        shown = capacity.node
        assert (shown.device, shown.devices, shown.is_gpu) == (devices.type, devices.count, devices.is_gpu)
        assert shown.free_devices == devices.count
        assert capacity.total.devices == (devices.count if devices.is_gpu else 0)

    @pytest.mark.parametrize(
        ("labels", "resource", "device"),
        [
            ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "amd.com/gpu", "AMD_Instinct_MI300X_OAM"),
            ({"dljob.dev/device": "Tesla-T4"}, "nvidia.com/gpu", "Tesla-T4"),
            ({"dljob.dev/device": "mine", "nvidia.com/gpu.product": A100}, "nvidia.com/gpu", A100),
        ],
        ids=["AMD's", "named by hand", "both"],
    )
    def test_gpus_are_recognized_by_other_labels(self, labels: Json, resource: str, device: str) -> None:
        [found] = view([node("g", labels=labels, allocatable={resource: "4"})], [pod("g", {resource: "1"})]).nodes
        assert (found.device, found.devices, found.free_devices, found.is_gpu) == (device, 4, 3, True)

    def test_power_limit_is_part_of_the_device_type(self) -> None:
        limited, wrong = gpu_node("g", 4), gpu_node("bad", 4)
        limited["metadata"]["labels"][LIMIT], wrong["metadata"]["labels"][LIMIT] = "250", "20"
        bad, good = view([limited, wrong]).nodes
        assert (good.device, good.left_out) == (f"{A100}@250W", None)
        assert bad.device == A100 and "node bad: found '20'" in bad.left_out

    def test_clock_limit_is_part_of_the_device_type(self) -> None:
        limited, wrong = gpu_node("g", 4), gpu_node("bad", 4)
        limited["metadata"]["labels"][CLOCK], wrong["metadata"]["labels"][CLOCK] = "1200", "abc"
        bad, good = view([limited, wrong]).nodes
        assert (good.device, good.left_out) == (f"{A100}@1200MHz", None)
        assert bad.device == A100 and "node bad: found 'abc'" in bad.left_out

    def test_gpu_node_without_device_plugin_is_not_a_cpu_node(self) -> None:
        [found] = view([gpu_node("g", 0)]).nodes
        assert (found.device, found.free_devices, found.is_gpu) == (A100, 0, True)
        [chosen] = view([node(labels={"dljob.dev/device": "big", "nvidia.com/gpu.product": A100})]).nodes
        assert (chosen.device, chosen.is_gpu) == ("big", False), "this label requests its CPUs"

    @pytest.mark.parametrize("away", [node(ready="False"), node(ready="Unknown"), node(unschedulable=True)])
    def test_unschedulable_nodes_are_excluded(self, away: Json) -> None:
        assert view([away]).nodes == ()

    @pytest.mark.parametrize(
        ("allocatable", "words"),
        [
            ({"nvidia.com/gpu": "9223372036854775807"}, "9.22e+18 devices"),
            ({"cpu": "9E"}, "9e+18 CPUs"),
            ({"memory": "9E"}, "bytes of memory"),
        ],
    )
    def test_node_with_absurd_capacity_is_left_out_and_named(self, allocatable: Json, words: str) -> None:
        """Fixed bug: while such a node existed, no job that could use it was planned."""
        absurd = gpu_node("bad", 4)
        absurd["status"]["allocatable"] |= allocatable
        found, other = view([absurd, gpu_node("good", 4)]).nodes
        assert "node bad" in found.left_out and words in found.left_out
        assert (found.free_devices, found.free_cpu, found.free_memory_nbytes) == (0, 0.0, 0)
        assert (other.left_out, other.free_devices) == (None, 4)

    def test_only_taints_that_repel_pods_count(self) -> None:
        taints = [
            {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
            {"key": "soft", "effect": "PreferNoSchedule"},
            {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},
        ]
        [found] = view([node(taints=taints)]).nodes
        assert found.taints == (("gpu", "yes", "NoSchedule"),)

    @pytest.mark.parametrize("name", ["disk-pressure", "memory-pressure", "pid-pressure", "network-unavailable"])
    def test_taints_about_a_pressure_count(self, name: str) -> None:
        """Fixed bug: a full disk leaves its node ready, and plans used the node, on which no pod could be placed."""
        key = f"node.kubernetes.io/{name}"
        [found] = view([node(taints=[{"key": key, "effect": "NoSchedule"}])]).nodes
        assert found.taints == ((key, "", "NoSchedule"),)

    @pytest.mark.parametrize(
        ("pods", "free"),
        [
            ([], 2.0),
            ([pod("n1", {"cpu": "500m"}, {"cpu": "0.25"})], 1.25),
            ([pod("n1", {"cpu": "1"}, phase="Succeeded"), pod("n1", {"cpu": "1"}, phase="Failed")], 2.0),
            ([pod(None, {"cpu": "1"}), pod("n2", {"cpu": "1"})], 2.0),
            ([pod("n1", {"cpu": "1"}, initContainers=[{"resources": {"requests": {"cpu": "1500m"}}}])], 0.5),
            ([pod("n1", {"cpu": "1"}, overhead={"cpu": "250m"})], 0.75),
            ([pod("n1", {"cpu": "5"})], 0.0),
            ([pod("n1", {"cpu": "1"}) | {"metadata": {"uid": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}}], 1.0),
        ],
    )
    def test_pods_reduce_free_resources(self, pods: list[Json], free: float) -> None:
        assert view([node()], pods).nodes[0].free_cpu == free

    def test_reservations_use_the_nodes_that_fit(self) -> None:
        crowded = [pod("n1", {"memory": "4Gi"}), pod("n2", {"cpu": "1"})]
        found = view([node("n1"), node("n2")], crowded, Reservation("cpu", 1, 1, 1.0, 2**30)).nodes
        assert [n.free_cpu for n in found] == [2.0, 0.0], "n1 has more CPUs, but no memory"

    def test_reservations_use_the_nodes_with_most_free_resources(self) -> None:
        found = view([node("n1"), node("n2")], [pod("n1", {"cpu": "1"})], Reservation("cpu", 1, 1, 1.5, 2**30)).nodes
        assert [n.free_cpu for n in found] == [1.0, 0.5]
        gpus = view([gpu_node("a", 2), gpu_node("b", 4)], [], Reservation(A100, 1, 4, 1.0, 0)).nodes
        assert [n.free_devices for n in gpus] == [2, 0]
        assert view([node()], [], Reservation("other", 1, 1, 1.0, 0)).nodes[0].free_cpu == 2.0

    @given(st.lists(st.integers(0, 3000), max_size=6), st.lists(st.integers(0, 3000), max_size=3))
    def test_free_resources_do_not_exceed_the_total(self, requests: list[int], reserved: list[int]) -> None:
        pods = [pod("n1", {"cpu": f"{cpu}m"}) for cpu in requests]
        [found] = view([node()], pods, *(Reservation("cpu", 1, 1, cpu / 1000, 0) for cpu in reserved)).nodes
        assert 0 <= found.free_cpu <= found.cpu
        assert found.free_cpu == pytest.approx(max(0.0, 2 - sum(requests + reserved) / 1000), abs=1e-9)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1500m", Decimal("1.5")),
        ("4Gi", 4 * 2**30),
        ("1e3", 1000),
        ("100n", Decimal("1e-7")),
        ("5u", Decimal("5e-6")),
        ("x", 0),
    ],
)
def test_quantities_of_the_api_server_are_parsed(text: str, value: Decimal) -> None:
    assert amount(text) == value


class TestTrim:
    def test_heartbeats_do_not_change_a_node(self) -> None:
        first, second = node(), node()
        second["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:01:00Z"
        second["status"]["images"] = [{"names": ["a"]}]
        assert trim.node(first) == trim.node(second)

    @pytest.mark.parametrize(
        ("container", "reason", "words"),
        [
            ({"state": {"running": {}}}, None, ""),
            ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}}, "ImagePullBackOff", "Back-off"),
            (
                {
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": "last words"}},
                },
                "OOMKilled", "exit code 137: last words",
            ),
        ],
    )  # fmt: skip
    def test_reason_of_a_stuck_container_is_found(self, container: Json, reason: str | None, words: str) -> None:
        meta = {"name": "p", "uid": "u"}
        found = trim.pod({"metadata": meta, "spec": {}, "status": {"containerStatuses": [container]}}).stuck
        assert (found.reason if found else None) == reason
        assert words in (found.message if found else "")

    @pytest.mark.parametrize(
        ("state", "last", "expected", "stuck"),
        [
            ({"waiting": {"reason": "PodInitializing"}}, {}, None, "PodInitializing"),
            ({"running": {}}, {}, Fetching(), None),
            ({"terminated": {"exitCode": 64, "message": "a\nno file\n"}}, {}, Fetching(64, "no file"), None),
            ({"running": {}}, {"terminated": {"exitCode": 74, "message": "cut"}}, Fetching(74, "cut"), None),
            (
                {"waiting": {"reason": "CrashLoopBackOff"}},
                {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, Fetching(137, "OOMKilled"), None,
            ),
            ({"waiting": {"reason": "CreateContainerConfigError"}}, {}, None, "CreateContainerConfigError"),
            ({"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 74}}, None, None),
        ],
        ids=["not yet", "running", "failed", "tries again", "waits to try again", "no secret", "done"],
    )  # fmt: skip
    def test_state_of_the_dataset_fetch(
        self, state: Json, last: Json, expected: Fetching | None, stuck: str | None
    ) -> None:
        container = {"name": "dataset", "state": state, "lastState": last}
        body = {"metadata": {"name": "p", "uid": "u"}, "spec": {}, "status": {"initContainerStatuses": [container]}}
        found = trim.pod(body)
        assert found.fetching == expected
        assert (found.stuck.reason if found.stuck else None) == stuck

    @pytest.mark.parametrize(
        ("name", "changes", "seconds"),
        [
            ("dataset", {}, 75.0),
            ("dataset", {"finishedAt": "2026-11-30T06:00:00Z"}, 0.0),
            ("dataset", {"exitCode": 74}, None),
            ("dataset", {"startedAt": None}, None),
            ("source", {}, None),
        ],
        ids=["done", "clock set back", "failed", "no times", "the script"],
    )
    def test_duration_of_the_dataset_fetch(self, name: str, changes: Json, seconds: float | None) -> None:
        times = {"startedAt": "2026-11-30T06:00:00Z", "finishedAt": "2026-11-30T06:01:15Z"}
        container = {"name": name, "state": {"terminated": {"exitCode": 0, **times, **changes}}}
        body = {"metadata": {"name": "p", "uid": "u"}, "spec": {}, "status": {"initContainerStatuses": [container]}}
        assert trim.pod(body).fetched_s == seconds

    def test_state_of_the_script_is_that_of_its_own_container(self) -> None:
        """The containers run one after the other. The agent's is none of those that fetch."""
        failed = {"name": "source", "state": {"terminated": {"exitCode": 64, "message": "no commit"}}}
        done = {"name": "source", "state": {"terminated": {"exitCode": 0}}}
        agent, dataset = ({"name": name, "state": {"running": {}}} for name in ("agent", "dataset"))
        meta = {"metadata": {"name": "p", "uid": "u"}, "spec": {}}
        cases = {
            Fetching(64, "no commit", "source"): [agent, failed],
            Fetching(): [done, dataset],
            None: [agent],
        }
        for expected, containers in cases.items():
            assert trim.pod({**meta, "status": {"initContainerStatuses": containers}}).fetching == expected

    def test_reason_of_an_unschedulable_pod_is_found(self) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        meta = {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
        found = trim.pod({"metadata": meta, "spec": {}, "status": {"conditions": [condition]}})
        assert found.unschedulable == "0/3 nodes" and found.deleting and not found.ready

    @pytest.mark.parametrize(
        "key", ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"]
    )
    def test_default_storage_class_is_found(self, key: str) -> None:
        assert storage.storage_class({"metadata": {"name": "s", "annotations": {key: "true"}}}).default
        assert not storage.storage_class({"metadata": {"name": "s"}}).default
        assert storage.storage_class({"metadata": {"name": "s"}, "provisioner": "nfs.csi.k8s.io"}).provisioner

    def test_job_is_trimmed(self) -> None:
        meta = {"name": "j", "namespace": "n", "uid": "u", "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z"}
        found = trim.job({"metadata": meta, "spec": {"a": 1}})
        assert found.created == datetime(2026, 1, 1, tzinfo=UTC) and (found.generation, found.status) == (3, {})
