"""A client of the API server that returns its answers as they are: code, body and warnings."""

import base64
import json
import ssl
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def access(kubeconfig: str) -> tuple[str, ssl.SSLContext]:
    """Return the URL of the API server in the current context, and TLS with the user's certificate."""
    config = yaml.safe_load(Path(kubeconfig).read_text())
    context = next(one["context"] for one in config["contexts"] if one["name"] == config["current-context"])
    cluster = next(one["cluster"] for one in config["clusters"] if one["name"] == context["cluster"])
    user = next(one["user"] for one in config["users"] if one["name"] == context["user"])
    tls = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority"))
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # load_cert_chain reads files only
        file.write(_pem(user, "client-certificate") + "\n" + _pem(user, "client-key"))
        file.flush()
        tls.load_cert_chain(file.name)
    return cluster["server"].rstrip("/"), tls


@dataclass(frozen=True)
class Answer:
    code: int
    body: Json
    warnings: tuple[str, ...]


class Server:
    """The API server of a kubeconfig's current context, and one namespace there."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self._url, self._tls = access(kubeconfig)
        self.jobs = f"/apis/dljob.dev/v1alpha1/namespaces/{namespace}/dljobs"

    def call(self, method: str, path: str, body: Json | None = None, kind: str = "json") -> Answer:
        """Send one request. ``kind``: json, merge-patch+json or apply-patch+yaml."""
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": f"application/{kind}", "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, context=self._tls, timeout=30) as answer:
                return Answer(answer.status, json.load(answer), tuple(answer.headers.get_all("Warning", [])))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read() or b"{}"), ())

    def create(self, manifest: Json, validation: str = "Strict") -> Answer:
        return self.call("POST", f"{self.jobs}?fieldValidation={validation}", manifest)


def _pem(section: Json, name: str) -> str:
    """Return the PEM text that a kubeconfig holds under `name`, as data or as a file."""
    if data := section.get(f"{name}-data"):
        return base64.b64decode(data).decode()
    return Path(section[name]).read_text()
