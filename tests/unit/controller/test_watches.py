"""Tests of how kopf is set up: it reads DLJobs, and neither copies nor changes them."""

from typing import Any

import kopf

from dljob.controller.watches import Watches


def test_kopf_neither_compares_nor_annotates_jobs() -> None:
    storage = Watches.settings().persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "a"}, "spec": {"epochs": 5}})  # type: ignore[typeddict-item]
    patch = kopf.Patch()
    storage.store(body=body, patch=patch, essence=storage.build(body=body))
    found: tuple[Any, ...] = (dict(storage.build(body=body)), storage.fetch(body=body), dict(patch))
    assert found == ({}, None, {})
