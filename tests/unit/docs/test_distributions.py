"""Tests of the three Python distributions: equal versions, and a requirement of dlcontract in that version."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import requirements

ROOT = Path(__file__).resolve().parents[3]


def project(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_versions_are_equal() -> None:
    assert {project(folder)["version"] for folder in requirements.MEMBERS.values()} == {project("operator")["version"]}


@pytest.mark.parametrize("folder", ["operator", "trainer-image"])
def test_dlcontract_is_required_in_the_same_version(folder: str) -> None:
    assert f"dlcontract=={project(folder)['version']}" in project(folder)["dependencies"]


def test_dependency_groups_contain_no_distribution_of_the_workspace() -> None:
    found = requirements.requirements("dev")
    assert {"kopf>=1.44", "torch>=2.4", "matplotlib>=3.8", "pytest>=8"} <= set(found)
    assert not [text for text in found if text.startswith(tuple(requirements.MEMBERS))]
