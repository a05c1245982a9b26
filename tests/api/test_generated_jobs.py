"""Generated DLJobs in a real API server: it and the operator agree about them, and each refusal names a field."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from dljob.reconcile import parse_observed
from support.builders import seen
from support.cluster.api_server import Answer, Server
from support.cluster.kubectl import Kubectl
from support.manifests.admission import refusals
from support.manifests.generated_specs import specs
from support.specs.small_specs import JOB

Json = dict[str, Any]
pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def server(kubectl: Kubectl) -> Server:
    """Return the API server with the CRDs. No operator watches this module's namespace."""
    refusals(JOB)  # The library for CEL raises the recursion limit, which hypothesis does not accept during a test.
    return Server(kubectl.kubeconfig, kubectl.namespace)


def tried(server: Server, spec: Json) -> Answer:
    """Return the server's answer to the creation of a job, which it does not store."""
    return server.call(
        "POST",
        f"{server.jobs}?fieldValidation=Strict&dryRun=All",
        {**JOB, "metadata": {"name": "generated"}, "spec": spec},
    )


def agree(server: Server, spec: Json) -> None:
    """Check that the server admits the spec if and only if the rules in memory admit it, and that refusals name a field.

    A spec that the server admits may still be refused by the operator, with the condition Accepted. One that the server
    refuses must be refused by the operator, too: the specs of earlier releases have not passed the rules of this one.
    """
    answer, expected = tried(server, spec), refusals({**JOB, "spec": spec})
    message = answer.body.get("message", "")
    assert answer.code in (201, 400, 422), (answer.code, message)
    assert (answer.code == 201) is (not expected), (message, expected)
    problem = parse_observed(seen(spec)).refusal
    if answer.code != 201:
        assert re.search(r"\bspec\.?\w*", message), message
        assert problem is not None, message
    assert problem is None or re.search(r"\bspec\.?\w*", problem.message), problem


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]


@settings(max_examples=300, deadline=None, suppress_health_check=CHECKS)
@given(specs())
def test_server_and_operator_agree_about_generated_jobs(server: Server, spec: Json) -> None:
    agree(server, spec)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=CHECKS)
@given(specs())
def test_server_and_operator_agree_about_thousands_of_generated_jobs(server: Server, spec: Json) -> None:
    agree(server, spec)
