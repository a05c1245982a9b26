"""Fixtures of the end-to-end tests: a cluster set up by hack/quickstart, and one namespace per module."""

import os
import re
from collections.abc import Iterator

import pytest

from support.cluster.kubectl import Kubectl


@pytest.fixture(scope="session")
def admin() -> Kubectl:
    kubeconfig = os.environ.get("DLJOB_TEST_KUBECONFIG")
    assert kubeconfig, "DLJOB_TEST_KUBECONFIG: not set, expected a kubeconfig; run hack/test e2e"
    return Kubectl(kubeconfig)


@pytest.fixture(scope="module")
def kubectl(admin: Kubectl, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    name = "e2e-" + re.sub(r"[^a-z0-9]+", "-", request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_"))
    admin.run("delete", "namespace", name, "--ignore-not-found", "--wait=true", timeout_s=180)
    admin.run("create", "namespace", name)
    if not request.node.get_closest_marker("privileged"):  # jobs that need more than `restricted` have this marker
        admin.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield Kubectl(admin.kubeconfig, name)
    admin.run("delete", "namespace", name, "--wait=false")
