"""A client of the API server that hack/crd-current starts; its answers as they are."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from crdserver.serve import Address

Json = dict[str, Any]
JOBS = "/apis/dljob.dev/v1alpha1/namespaces/default/dljobs"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass(frozen=True)
class Answer:
    code: int
    body: Json
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Server:
    address: Address

    def call(self, method: str, path: str, body: Json | None = None, kind: str = "json") -> Answer:
        """One request. ``kind``: json, merge-patch+json or apply-patch+yaml."""
        request = urllib.request.Request(
            self.address.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": f"application/{kind}", "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, context=self.address.context(), timeout=30) as answer:
                return Answer(answer.status, json.load(answer), tuple(answer.headers.get_all("Warning", [])))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read() or b"{}"), ())

    def create(self, manifest: Json, validation: str = "Strict") -> Answer:
        return self.call("POST", f"{JOBS}?fieldValidation={validation}", manifest)
