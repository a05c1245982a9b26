"""Tests that the rendered NetworkPolicy allows exactly the intended connections, with an evaluator of policies."""

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest

from dlcontract import AGENT_PORT, METRICS_PORT, MPI_PORTS
from dljob.api import DLJobSpec
from dljob.job.observed import JOB_LABEL, Observed
from dljob.job.plan.stored import StoredPlan
from dljob.render import RenderConfig, network_policy
from dljob.render.config import Manifest
from support.builders import CONFIG, DIGITS, Json, planned, seen
from support.manifests.network_policy import Peer, flows, selects
from support.manifests.schema_validation import ALL, assert_valid

PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}
MONITORED = replace(CONFIG, metrics_peers=(PROMETHEUS,))
TORCHRUN: Json = {
    **DIGITS,
    "collective": "Auto",
    "trainer": {"command": ["python", "ddp.py"], "framework": "Torchrun"},
}
MPI: Json = {**TORCHRUN, "trainer": {"command": ["python", "horovod.py"], "framework": "MPI"}}
Opener = Literal["", "torchrun", "mpi", "collective", "ddp"]


def pod(job: str, namespace: str = "team-a", **labels: str) -> Peer:
    return Peer(namespace, {JOB_LABEL: job, **labels})


DIGITS_POD = pod("digits", **{"dljob.dev/group": "cpu"})
SOURCES = {
    "the same job": pod("digits", **{"dljob.dev/group": "t4"}),
    "another job": pod("wine"),
    "a job of that name in another namespace": pod("digits", "team-b"),
    "a pod of no job": Peer("team-a", {"app": "shell"}),
    "prometheus": Peer("monitoring", {"app": "prometheus"}),
    "another pod of its namespace": Peer("monitoring", {"app": "shell"}),
    "a prometheus elsewhere": Peer("team-b", {"app": "prometheus"}),
    "outside": Peer(address="192.0.2.7"),
}
FIRST_MPI, LAST_MPI = MPI_PORTS
INNER = (AGENT_PORT, FIRST_MPI, FIRST_MPI + 41, LAST_MPI)
OTHER = (22, AGENT_PORT - 1, AGENT_PORT + 1, FIRST_MPI - 1, LAST_MPI + 1, METRICS_PORT + 1, 29500)


@cache
def plan(torch: Opener, job: str) -> tuple[Observed, DLJobSpec, StoredPlan]:
    observed = seen(
        {
            "": DIGITS,
            "torchrun": TORCHRUN,
            "mpi": MPI,
            "collective": {**DIGITS, "collective": "Torch"},
            "ddp": {**DIGITS, "collective": "DDP"},
        }[torch],
        name=job,
    )
    return observed, DLJobSpec.model_validate(observed.job.spec), planned(observed)


def policies(config: RenderConfig = CONFIG, torch: Opener = "") -> list[Manifest]:
    """Return the policies of two jobs on one cluster."""
    plans = [plan(torch, job) for job in ("digits", "wine")]
    return [network_policy(observed.job, spec, accepted, config) for observed, spec, accepted in plans]


def reaching(port: int, config: RenderConfig = CONFIG, torch: Opener = "", protocol: str = "TCP") -> set[str]:
    """Return the sources that can reach a pod of ``digits``."""
    rules = policies(config, torch)
    return {name for name, source in SOURCES.items() if flows(rules, source, DIGITS_POD, port, protocol)}


class TestPorts:
    @pytest.mark.parametrize("port", INNER)
    def test_only_pods_of_the_job_reach_agent_and_mpi_ports(self, port: int) -> None:
        assert reaching(port, MONITORED) == {"the same job"}

    def test_only_configured_sources_reach_the_metrics_port(self) -> None:
        assert reaching(METRICS_PORT, MONITORED) == {"prometheus"}

    @pytest.mark.parametrize("port", OTHER)
    def test_other_ports_are_unreachable(self, port: int) -> None:
        assert reaching(port, MONITORED) == set()

    @pytest.mark.parametrize("port", [AGENT_PORT, FIRST_MPI, METRICS_PORT])
    def test_udp_is_blocked(self, port: int) -> None:
        assert reaching(port, MONITORED, protocol="UDP") == set()


@pytest.mark.parametrize("torch", ["", "torchrun"])
def test_every_kubernetes_version_accepts_the_crd(torch: Opener) -> None:
    for policy in policies(MONITORED, torch):
        assert_valid(policy)


def test_mpi_ports_are_one_range() -> None:
    """Every supported release knows ``endPort`` (Kubernetes 1.25 and later)."""
    for policy in policies(CONFIG):
        ports = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert [(port["port"], port["endPort"]) for port in ports if "endPort" in port] == [MPI_PORTS]
        assert len(ports) == 3  # the agent's, MPI's and that of the metrics


def test_without_configured_sources_all_may_reach_only_the_metrics_port() -> None:
    assert reaching(METRICS_PORT) == set(SOURCES)
    assert reaching(AGENT_PORT) == {"the same job"}


@pytest.mark.parametrize("torch", ["torchrun", "mpi", "collective", "ddp"])
@pytest.mark.parametrize("port", [29500, 45678, AGENT_PORT])
def test_torch_ports_are_open_only_within_the_job(torch: Opener, port: int) -> None:
    assert reaching(port, torch=torch) == {"the same job"}


@pytest.mark.parametrize(
    ("target", "port", "protocol"),
    [
        (Peer("kube-system", {"k8s-app": "kube-dns"}), 53, "UDP"),
        (Peer("kube-system", {"k8s-app": "kube-dns"}), 53, "TCP"),
        (Peer(address="192.0.2.1"), 6443, "TCP"),
        (Peer(address="198.51.100.9"), 443, "TCP"),
    ],
    ids=["DNS", "DNS over TCP", "API server", "a data set"],
)
def test_pods_reach_dns_the_api_server_and_datasets(target: Peer, port: int, protocol: str) -> None:
    assert flows(policies(), DIGITS_POD, target, port, protocol)


def test_other_pods_are_not_isolated() -> None:
    assert flows(policies(), SOURCES["outside"], SOURCES["a pod of no job"], 22)


class TestEvaluator:
    """The evaluator follows the API reference. A wrong evaluator would make the other tests meaningless."""

    POD = Peer("ns", {"app": "a"})

    def policy(self, types: tuple[str, ...] = ("Ingress",), **rules: Any) -> Json:
        meta = {"name": "p", "namespace": "ns"}
        spec = {"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": list(types), **rules}
        manifest = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}
        assert_valid(manifest, ALL[-1:])
        return manifest

    def test_policy_without_rules_blocks_ingress(self) -> None:
        assert not flows([self.policy()], self.POD, self.POD, 80)

    def test_empty_rule_allows_all_ingress(self) -> None:
        assert flows([self.policy(ingress=[{}])], Peer(), self.POD, 80, "SCTP")

    def test_policies_are_additive(self) -> None:
        assert flows([self.policy(), self.policy(ingress=[{"ports": [{"port": 80}]}])], Peer(), self.POD, 80)

    def test_policy_of_another_namespace_has_no_effect(self) -> None:
        assert flows([self.policy()], Peer(), replace(self.POD, namespace="other"), 80)

    def test_egress_is_checked_at_the_source(self) -> None:
        closed = self.policy(("Egress",), egress=[{"to": [{"podSelector": {}}], "ports": [{"port": 80}]}])
        assert flows([closed], self.POD, Peer("ns"), 80)
        assert not flows([closed], self.POD, Peer("ns"), 81)
        assert not flows([closed], self.POD, Peer("other"), 80)
        assert flows([closed], Peer("other"), self.POD, 81)

    @pytest.mark.parametrize(("address", "expected"), [("10.1.0.1", True), ("10.1.2.3", False), ("10.2.0.1", False)])
    def test_ip_blocks_match_addresses(self, address: str, expected: bool) -> None:
        block = {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}
        rules = [self.policy(ingress=[{"from": [{"ipBlock": block}]}])]
        assert flows(rules, Peer(address=address), self.POD, 80) is expected

    @pytest.mark.parametrize(
        ("operator", "values", "expected"),
        [
            ("In", ["a", "b"], True),
            ("In", ["b"], False),
            ("NotIn", ["b"], True),
            ("NotIn", ["a"], False),
            ("Exists", [], True),
            ("DoesNotExist", [], False),
        ],
    )
    def test_label_expressions_match(self, operator: str, values: list[str], expected: bool) -> None:
        expression = {"key": "app", "operator": operator, "values": values}
        assert selects({"matchExpressions": [expression]}, {"app": "a"}) is expected
