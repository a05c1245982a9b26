"""A current API server for custom resources, started by hack/crd-current, with our definitions."""

import os
from pathlib import Path

import pytest

from crdserver.serve import Address
from dljob.api import crd
from support.crd_server_client import DEFINITIONS, Server
from support.kubectl import wait_for


@pytest.fixture(scope="session")
def server() -> Server:
    """With our definitions, served."""
    url, folder = os.environ.get("DLJOB_CRD_SERVER"), Path(os.environ.get("DLJOB_CRD_SERVER_PEM", "."))
    assert url, "DLJOB_CRD_SERVER: not set, expected the address of a server; run hack/crd-current"
    found = Server(Address(url, folder / "certificate.pem", folder / "key.pem"))
    for definition in crd.definitions():
        answer = found.call("POST", f"{DEFINITIONS}?fieldValidation=Strict", definition)
        assert answer.code == 201, answer.body.get("message")
        assert answer.warnings == ()
    _wait_served(found)
    return found


def _wait_served(server: Server) -> None:
    """Until a server that has just taken the definitions serves their kinds."""
    for definition in crd.definitions():
        path = f"/apis/dljob.dev/v1alpha1/{definition['spec']['names']['plural']}"
        wait_for(f"{path} to be served", lambda p=path: server.call("GET", p).code == 200, 30)  # type: ignore[misc]
