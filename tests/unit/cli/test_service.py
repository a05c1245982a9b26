"""Tests of the recommendation service over HTTP."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan
from typing import Any

import pytest

from dljob.api import API_VERSION
from dljob.cli import main
from dljob.cluster import cluster_view
from dljob.service import MAX_NBYTES, Service

NODES = {"nodes": [{"name": "n", "count": 3, "cpu": 2}]}
JOB: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "DLJob",
    "metadata": {"name": "digits"},
    "spec": {
        "model": {"name": "digits-cnn"},
        "dataset": {"name": "digits"},
        "globalBatchSize": 96,
        "epochs": 5,
        "nodes": {"min": 3},
    },
}
PROFILE: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "DLProfile",
    "metadata": {"name": "p"},
    "spec": {"model": "digits-cnn", "device": "cpu"},
    "status": {"compute": [{"batch": 32, "seconds": 0.05}]},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def send(server: Service, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=240)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
        reply = connection.getresponse()
        assert reply.headers["Content-Type"] == "application/json"
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def test_request_may_contain_the_administrators_defaults(service: Service) -> None:
    question = {"job": JOB, "cluster": NODES, "jobDefaults": {"scheduling": {"priorityClassName": "batch"}}}
    status, reply = send(service, "POST", "/v1/plan", question)
    assert status == 200 and reply["plan"]["defaults"] == ["scheduling.priorityClassName: batch"]
    status, reply = send(service, "POST", "/v1/plan", {**question, "jobDefaults": {"prices": {"usdPerKwh": 0}}})
    assert status == 400 and reply["error"].startswith("jobDefaults.prices.usdPerKwh: found 0")


def test_health_endpoint_answers(service: Service) -> None:
    assert send(service, "GET", "/healthz") == (200, {"status": "ok"})


def test_plan_is_returned(service: Service) -> None:
    code, answer = send(service, "POST", "/v1/plan", {"job": JOB, "cluster": NODES})
    assert (code, answer["job"], answer["infeasible"]) == (200, "digits", None)
    assert answer["plan"]["groups"] == [
        {"name": "cpu", "device": "cpu", "nodes": 3, "ranks": 3, "batchPerRank": [32, 32, 32]}
    ]
    assert answer["plan"]["predicted"]["basis"] == "catalogue"
    assert answer["plan"]["candidates"][0]["chosen"]


def test_plan_uses_the_given_profiles(service: Service) -> None:
    _, answer = send(service, "POST", "/v1/plan", {"job": JOB, "cluster": NODES, "profiles": [PROFILE]})
    assert answer["plan"]["predicted"]["basis"] == "profile"
    assert answer["plan"]["predicted"]["computeSeconds"] == pytest.approx(0.05)


@pytest.mark.parametrize(("namespace", "basis"), [("team-a", "profile"), ("team-b", "catalogue")])
def test_profile_for_one_namespace_counts_only_there(service: Service, namespace: str, basis: str) -> None:
    job = {**JOB, "metadata": {"name": "digits", "namespace": namespace}}
    profile = {**PROFILE, "spec": {**PROFILE["spec"], "namespace": "team-a"}}
    _, answer = send(service, "POST", "/v1/plan", {"job": job, "cluster": NODES, "profiles": [profile]})
    assert answer["plan"]["predicted"]["basis"] == basis


def test_infeasible_job_is_a_valid_answer(service: Service) -> None:
    spec = {**JOB["spec"], "nodes": {"min": 9}}
    code, answer = send(service, "POST", "/v1/plan", {"job": {**JOB, "spec": spec}, "cluster": NODES})
    assert (code, answer["plan"]) == (200, None)
    assert (answer["infeasible"]["reason"], answer["infeasible"]["field"]) == ("TooFewNodes", "spec.nodes.min")
    assert answer["infeasible"]["transient"]


CONSTANTS = {
    "sharing": 0.1,
    "crowding": 0.1,
    "interNodeSeconds": 1e-3,
    "intraNodeSeconds": 1e-4,
    "latencySeconds": 1e-5,
    "overlapGamma": 2,
    "computeDeviation": 0.1,
    "communicationDeviation": 0.1,
}


def measured(**status: Any) -> dict[str, Any]:
    """Return a request with an invalid profile."""
    return {"job": JOB, "cluster": NODES, "profiles": [{**PROFILE, "status": status}]}


def with_spec(**changes: Any) -> dict[str, Any]:
    return {"job": {**JOB, "spec": JOB["spec"] | changes}, "cluster": NODES}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: found invalid JSON"),
        (b"[" * 100_000, "body: found JSON nested too deeply"),
        ([], "request: found list; expected a JSON object with the keys job, cluster"),
        ({"cluster": NODES}, "request: found ['cluster']"),
        ({"job": JOB, "nodes": []}, "request: found ['job', 'nodes']"),
        ({"job": JOB}, "cluster: found none"),
        ({"job": 3, "cluster": NODES}, "manifest: found int; expected a mapping"),
        ({"job": {"kind": "Job"}, "cluster": NODES}, "kind 'Job'; expected apiVersion dljob.dev/v1alpha1, kind DLJob"),
        ({"job": {**JOB, "metadata": {}}, "cluster": NODES}, "metadata.name: found nothing"),
        ({"job": {**JOB, "metadata": {"name": "A_b"}}, "cluster": NODES}, "metadata.name: found 'A_b'"),
        ({"job": {**JOB, "spec": None}, "cluster": NODES}, "spec: found nothing"),
        (with_spec(globalBatchSize=0), "spec.globalBatchSize: found 0"),
        (with_spec(epochz=3), "spec.epochz: found an unknown field"),
        (with_spec(nodes={"min": 4, "max": 2}), "spec.nodes.min must not be larger than max"),
        ({"job": JOB, "cluster": {"nodes": [{"cpu": "x"}]}}, "cluster: nodes[0].cpu: found 'x'"),
        ({"job": JOB, "cluster": NODES, "profiles": {}}, "profiles: found dict; expected a list"),
        ({"job": JOB, "cluster": NODES, "profiles": [3]}, "profiles[0].spec"),
        (
            measured(compute=[{"batch": 1, "seconds": -1}]),
            "compute.0.seconds: found -1; expected a number greater than 0",
        ),
        (measured(compute=[{"batch": 1, "seconds": inf}]), "compute.0.seconds: found inf; expected a finite number"),
        (measured(compute=[{"batch": 1, "seconds": 1e300}]), "compute.0.seconds: found 1e+300; expected a number less"),
        (measured(linkLatencySeconds=inf), "profiles[0].status.linkLatencySeconds: found inf; expected a finite"),
        (measured(constants=CONSTANTS | {"sharing": nan}), "profiles[0].status.constants.sharing: found nan; expected"),
        (measured(constants=CONSTANTS | {"overlapGamma": 1e300}), "constants.overlapGamma: found 1e+300; expected"),
    ],
)
def test_invalid_request_is_explained(service: Service, body: Any, message: str) -> None:
    code, answer = send(service, "POST", "/v1/plan", body)
    assert code == 400
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/", 404), ("POST", "/", 404), ("GET", "/v1/plan", 405), ("GET", "/healthz/../x", 404)],
)
def test_other_paths_and_methods_are_rejected(service: Service, method: str, path: str, code: int) -> None:
    found, answer = send(service, method, path)
    assert found == code
    assert "expected" in answer["error"]


@pytest.mark.parametrize(
    ("header", "code"),
    [(f"Content-Length: {MAX_NBYTES + 1}\r\n", 413), ("", 411), ("Content-Length: many\r\n", 411)],
)
def test_body_without_length_or_too_large_is_not_read(service: Service, header: str, code: int) -> None:
    with socket.create_connection(("127.0.0.1", service.server_address[1]), timeout=240) as client:
        client.sendall(f"POST /v1/plan HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        assert client.recv(4096).startswith(f"HTTP/1.1 {code} ".encode())
        while client.recv(4096):  # the service closes the connection
            pass


def test_concurrent_requests_get_the_same_answer(service: Service) -> None:
    def request_plan(_: int) -> Any:
        return send(service, "POST", "/v1/plan", {"job": JOB, "cluster": NODES})

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(request_plan, range(48)))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == 200


def test_service_may_have_a_default_cluster() -> None:
    with Service(("127.0.0.1", 0), cluster_view(NODES)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert send(server, "POST", "/v1/plan", {"job": JOB})[1]["plan"]["nodes"] == 3
            other = {"job": JOB, "cluster": {"nodes": [{"count": 5, "cpu": 1}]}}
            assert send(server, "POST", "/v1/plan", other)[1]["plan"]["nodes"] >= 3
        finally:
            server.shutdown()
            thread.join()


def test_port_in_use_is_named(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    port = service.server_address[1]
    assert main(["serve", "--port", str(port)]) == 2
    message = f"--port: found {port}, on which another process listens at 127.0.0.1; expected a free port"
    assert message in capsys.readouterr().err
