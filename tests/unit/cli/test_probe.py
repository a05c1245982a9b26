"""Tests of ``dljob probe``: which nodes it measures, its pods, and what it prints and stores."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract.hardware import MeasuredStructures
from dlcontract.structures import structures
from dljob.calibrate.hardware import workload_of
from dljob.calibrate.learned import Learned
from dljob.cli import main, probe_pods
from dljob.cli.commands import probe
from dljob.cli.hardware_tables import hardware_table
from dljob.client import files
from dljob.client.errors import BadInputError
from dljob.cluster import catalogue
from dljob.cluster.hardware import KEY, Hardware
from dljob.job.observed import JOB_LABEL
from dljob.job.probes.hardware import hardware_of, hardware_profile
from dljob.job.probes.targets import Target, probe_targets
from dljob.job.profiles import learned_by_model
from dljob.kube.kinds import NODE, POD, PROFILE
from dljob.perf.step.compute import catalogue_curve
from dljob.render.helpers.probe import ProbeImage, peer_pod, probe_pod
from support.planner_questions import view
from support.servers.fake_api import FakeApi
from support.servers.probed_cluster import MEASURE, Kubelet, cluster, node

A100 = "NVIDIA-A100-SXM4-40GB"
GPUS = {"count": 2, "cpu": 64, "device": A100, "devices": 8}
TWO = view({"count": 2, "cpu": 4, "device": "plain"}, GPUS)
ONE_HOST = view({"count": 2, "cpu": 4, "device": "plain", "machine": "host-1"}, GPUS)
KNOWN = {(KEY, "plain"): Learned(hardware=Hardware())}


def given(*arguments: str) -> argparse.Namespace:
    from dljob.cli.entry import parser

    return parser().parse_args(["probe", *arguments])


class TestTargets:
    def test_each_class_without_a_measurement_has_one_target_and_a_second_node(self) -> None:
        found, why = probe_targets(TWO, {})
        assert [(t.device, t.is_gpu, t.node, t.peer) for t in found] == [
            (A100, True, "n1-0", "n1-1"),
            ("plain", False, "n0-0", "n0-1"),
        ]
        assert not why

    def test_the_second_node_is_on_another_machine_if_there_is_one(self) -> None:
        """Regression: the link between two nodes of one machine was stored as that of the network."""
        place = {"cpu": 4, "device": "plain"}
        hosts = view({"count": 2, "machine": "host-1"} | place, {"machine": "host-2"} | place)
        assert [(t.node, t.peer) for t in probe_targets(hosts, {})[0]] == [("n0-0", "n1")]
        assert [(t.node, t.peer) for t in probe_targets(ONE_HOST, {}, ["plain"])[0]] == [("n0-0", "n0-1")]

    @pytest.mark.parametrize(
        ("options", "devices", "reason"),
        [
            ({"known": KNOWN}, [A100], "measured before"),
            ({"known": KNOWN, "devices": ["plain"]}, ["plain"], None),
            ({"known": KNOWN, "node": "n0-1"}, ["plain"], None),
            ({"devices": ["other"]}, [], "--device: found other"),
            ({"node": "missing"}, [], "--node: found no node missing"),
            ({"busy": {"n0-0", "n0-1"}}, [A100], "pods of jobs run"),
            ({"busy": {"n0-0"}, "devices": ["plain"]}, ["plain"], None),
            (
                {"view": ONE_HOST, "busy": {"n0-0"}},
                [A100],
                "jobs use the machine of its nodes (label dljob.dev/machine); or pods of jobs",
            ),
        ],
    )
    def test_classes_are_left_out_with_a_reason(
        self, options: dict[str, Any], devices: list[str], reason: str | None
    ) -> None:
        found, why = probe_targets(**{"view": TWO, "known": {}} | options)
        assert [target.device for target in found] == devices
        assert (reason in why[0]) if reason else not why
        assert not {target.node for target in found} & set(options.get("busy", ()))

    @pytest.mark.parametrize(
        ("key", "effect", "able"), [("team", "NoSchedule", False), ("team", "PreferNoSchedule", True)]
    )
    def test_a_tainted_node_is_measured_only_with_a_toleration(self, key: str, effect: str, able: bool) -> None:
        tainted = view({"cpu": 4, "taints": [{"key": key, "effect": effect}]})
        assert bool(probe_targets(tainted, {})[0]) == able
        assert probe_targets(tainted, {}, tolerations=[{"key": key, "operator": "Exists"}])[0]

    def test_a_left_out_node_has_its_real_reason(self) -> None:
        """Fixed bug: the message said that repeated faults had occurred, whatever the reason."""
        wrong = {"dljob.dev/power-limit": "9000"}
        limited = view(*({"device": A100, "devices": 8, "cpu": 64, "labels": wrong} for _ in range(6)))
        found, (why,) = probe_targets(limited, {})
        assert not found and "faults" not in why
        assert f"{A100}: not measured, because plans leave out node n0 (label dljob.dev/power-limit of node n0: " in why
        assert why.count("plans leave out") == 4 and why.endswith("; and for 2 more reasons")

    def test_a_full_node_is_not_measured(self) -> None:
        full = view(
            {"cpu": 4, "device": A100, "devices": 1, "free": 0}, {"cpu": "250m"}, {"memory": "1Gi", "device": "s"}
        )
        found, why = probe_targets(full, {})
        assert not found
        assert len(why) == 3
        assert all("not measured" in line for line in why)


class TestPods:
    TARGET = Target("plain", False, "a", 4.0, "b")
    IMAGE = ProbeImage("example.org/trainer:1", ("pull",), "runtime", ({"key": "team", "operator": "Exists"},))

    def test_the_pod_is_restricted_and_bounded(self) -> None:
        pod = probe_pod("p", "ns", self.TARGET, self.IMAGE)["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert pod["activeDeadlineSeconds"] <= 600
        assert pod["restartPolicy"] == "Never"
        assert not pod["automountServiceAccountToken"]
        assert all("emptyDir" in volume for volume in pod["volumes"])
        assert container["resources"]["requests"] == {"cpu": "1000m", "memory": "2Gi"}
        assert "--peer" not in container["command"]
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert pod["tolerations"] == [{"key": "team", "operator": "Exists"}]

    def test_a_gpu_pod_asks_for_one_gpu_and_tolerates_its_taint(self) -> None:
        pod = probe_pod("p", "ns", Target(A100, True, "g", 0.5), ProbeImage("i"))["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["resources"]["requests"]["cpu"] == "500m"
        assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert container["command"][-4:-2] == ["--device", "gpu"]

    @pytest.mark.parametrize(("address", "peer"), [("10.0.0.7", "10.0.0.7:28470"), ("fd00::7", "[fd00::7]:28470")])
    def test_the_peer_runs_on_the_other_node(self, address: str, peer: str) -> None:
        assert probe_pod("p", "ns", self.TARGET, self.IMAGE, address)["spec"]["containers"][0]["command"][-1] == peer
        other = peer_pod("q", "ns", self.TARGET, self.IMAGE)["spec"]
        (term,) = other["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchFields"][0]["values"] == ["b"]
        assert "--serve" in other["containers"][0]["command"]


class TestInCluster:
    def test_a_class_is_measured_stored_and_shown_and_the_pods_are_deleted(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        api = cluster(MEASURE.model_copy(update={"far": MEASURE.near}).to_json())
        assert asyncio.run(probe._in_cluster(api, given("--link"))) == 0
        assert len(api.started) == 2
        assert not api.pods
        (profile,) = (body for (plural, _, _), body in api.objects.items() if plural == PROFILE.plural)
        assert profile["spec"] == {"model": "hardware", "device": "plain"}
        assert profile["status"]["hardware"]["node"] == "a"
        out = capsys.readouterr().out
        assert "DATA SHEET" in out
        assert profile["metadata"]["name"] in out
        # The next call leaves the class out.
        assert asyncio.run(probe._in_cluster(api, given())) == 0
        assert len(api.started) == 2
        assert "measured before" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("message", "phase", "said"),
        [
            ("no JSON", "Succeeded", "expected the document of the hardware probe"),
            ("out of memory", "Failed", "exit code 1: out of memory"),
        ],
    )
    def test_a_failed_probe_has_one_line_and_leaves_nothing(
        self, message: str, phase: str, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        api = cluster(message, phase)
        assert asyncio.run(probe._in_cluster(api, given())) == 1
        assert said in capsys.readouterr().err
        assert not api.pods
        assert not [key for key in api.objects if key[0] == PROFILE.plural]

    def test_nodes_with_pods_of_jobs_are_not_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        api = cluster(MEASURE.to_json())
        for name in ("a", "b"):
            body = {
                "metadata": {"namespace": "team", "name": f"job-{name}", "labels": {JOB_LABEL: "job"}},
                "spec": {"nodeName": name, "containers": []},
                "status": {"phase": "Running"},
            }
            asyncio.run(FakeApi.create(api, POD, body))
        assert asyncio.run(probe._in_cluster(api, given())) == 1
        assert "pods of jobs run" in capsys.readouterr().err
        assert not api.started

    def test_a_pod_that_does_not_start_is_deleted_after_the_limit(self) -> None:
        api = cluster("", phase="Pending")
        assert asyncio.run(probe._in_cluster(api, given("--timeout", "0.1"))) == 1
        assert not api.pods

    def test_without_an_operator_the_image_must_be_named(self) -> None:
        api = Kubelet("")
        asyncio.run(FakeApi.create(api, NODE, node("a")))
        with pytest.raises(BadInputError, match="--image"):
            asyncio.run(probe._in_cluster(api, given("--namespace", "n")))


class TestStructures:
    """``--structures N``: random networks, and the regression that is refitted to them."""

    ROWS = MeasuredStructures(
        s=tuple(
            2 * catalogue_curve(workload_of(net), catalogue.cpu("cpu", 1.0)).seconds(net.batches[0])
            for net in structures(30)
        ),
        grown_KiB=(100_000,) * 30,
    )
    FULL = MEASURE.model_copy(update={"structures": ROWS})

    def test_a_measured_class_is_measured_again_and_its_regression_is_stored_and_shown(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        api = cluster(self.FULL.to_json())
        assert asyncio.run(probe._in_cluster(api, given())) == 0
        assert asyncio.run(probe._in_cluster(api, given("--structures", "30"))) == 0
        assert len(api.started) == 2
        (profile,) = (body for (plural, _, _), body in api.objects.items() if plural == PROFILE.plural)
        assert profile["status"]["hardware"]["regression"]["networks"] == 30
        out = capsys.readouterr().out
        assert "median error on unseen networks, of 30" in out
        assert "step time" in out

    @pytest.mark.parametrize(
        ("changed", "networks"),
        [({}, 30), ({"kernel": "6.2"}, None), ({"driver": "2"}, None), ({"torch": "3"}, None), ({"device": "B"}, None)],
    )
    def test_a_later_measurement_keeps_the_regression_unless_the_software_has_changed(
        self, changed: dict[str, str], networks: int | None
    ) -> None:
        """Fixed bug: ``dljob probe`` without ``--structures`` deleted the regression."""
        api = cluster(self.FULL.to_json())
        assert asyncio.run(probe._in_cluster(api, given("--structures", "30"))) == 0
        api.message = MEASURE.model_copy(update=changed).to_json()
        assert asyncio.run(probe._in_cluster(api, given("--device", "plain"))) == 0
        assert len(api.started) == 2
        (profile,) = (body for (plural, _, _), body in api.objects.items() if plural == PROFILE.plural)
        assert (profile["status"]["hardware"].get("regression") or {}).get("networks") == networks

    def test_the_pod_trains_as_many_networks(self) -> None:
        target, image = Target("plain", False, "a", 4.0), ProbeImage("i")
        command = probe_pod("p", "ns", target, image, structures=30)["spec"]["containers"][0]["command"]
        assert command[-2:] == ["--structures", "30"]

    def test_a_document_without_networks_is_a_failure_with_a_remedy(self, capsys: pytest.CaptureFixture[str]) -> None:
        api = cluster(MEASURE.to_json())
        assert asyncio.run(probe._in_cluster(api, given("--structures", "30"))) == 1
        assert "found no refitted regression" in capsys.readouterr().err

    @pytest.mark.parametrize(("named", "code"), [((), 0), (("--device", A100), 1)])
    def test_gpus_are_left_out(self, named: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
        api = cluster(self.FULL.to_json())
        gpu = node("g")
        gpu["metadata"]["labels"] = {"nvidia.com/gpu.product": A100, "kubernetes.io/hostname": "g"}
        gpu["status"]["allocatable"] = gpu["status"]["capacity"] | {"nvidia.com/gpu": "1"}
        asyncio.run(FakeApi.create(api, NODE, gpu))
        assert asyncio.run(probe._in_cluster(api, given("--structures", "30", *named))) == code
        assert "--structures measures CPUs only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--local", "--node", "a"], "--node"),
        (["--local", "--device", "a", "--device", "b"], "--device"),
        (["--output", "file"], "--output"),
        (["--structures", "23"], "--structures: found 23; expected 24 to 96"),
        (["--local", "--structures", "97"], "--structures"),
    ],
)
def test_options_that_exclude_each_other_have_one_error(
    arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    assert field in capsys.readouterr().err


def test_a_local_profile_is_what_plan_reads(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    from dljob.job.probes.hardware import hardware_body

    path = tmp_path / "hardware.yaml"
    body = hardware_body(hardware_profile(MEASURE, "plain"), "plain", datetime.now(UTC))
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    found = learned_by_model(files.profiles(str(path)), "")
    assert found[KEY, "plain"].hardware == hardware_of(hardware_profile(MEASURE, "plain"), "plain")


def test_the_table_shows_sheet_measurement_ratio_and_doubts() -> None:
    profile = hardware_profile(MEASURE, "plain", "a")
    absurd = profile.model_copy(update={"disk_read_bytes_per_second": 1.0})
    lines = "\n".join(hardware_table("plain", absurd, hardware_of(absurd, "plain")))
    assert "500 MB/s" not in lines, "an impossible rate is not shown as measured"
    assert "Warning: disk: found 1 B/s" in lines
    assert "Note:    a note" in lines
    lines = "\n".join(hardware_table("plain", profile, hardware_of(profile, "plain")))
    assert "500 MB/s" in lines
    assert "4.00" in lines
    assert "CPUs that others use" in lines and "0.31" in lines


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(probe_pods, "LOOK_S", 0.01)
    yield
