"""Tests of the energy, cost and carbon that ``dljob report`` and the SDK add to the run report."""

import asyncio
import base64
import gzip
import json
from typing import Any
from xml.etree import ElementTree

import pytest

from dlcontract import RunPhase
from dljob.cli import main
from dljob.cli.commands import records
from dljob.client.output.usage import text_with_usage, usage_of
from dljob.kube import Api, ApiError
from dljob.kube.kinds import CONFIG_MAP, Kind
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import page
from support.trainer.plans import make_plan

USAGE = {
    "time": "2026-01-01T00:00:00Z",
    "deviceSeconds": 1284.0,
    "energyJoules": 162871.3,
    "energySource": "Mixed",
    "countedJoules": 90000.0,
    "cost": 0.31,
    "carbonGrams": 21.4,
}


def document() -> Document:
    return History(make_plan(1), 0.0).document(RunPhase.SUCCEEDED, 1, 60.0, None)


class Cluster(Api):
    """An API server with the records of the job ``digits``, and with the job unless ``forbidden`` is True."""

    def __init__(self, usage: dict[str, Any] | None, forbidden: bool = False) -> None:
        self.usage, self.forbidden = usage, forbidden

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        if kind is CONFIG_MAP:
            files = {"html": page(document()), "json": document().to_json()}
            packed = {f"report.{k}.gz": base64.b64encode(gzip.compress(t.encode())).decode() for k, t in files.items()}
            return {"metadata": {"name": name}, "binaryData": packed}
        if self.forbidden:
            raise ApiError(403, "Forbidden", "dljobs")
        return {"metadata": {"name": name}, "status": {} if self.usage is None else {"usage": self.usage}}


def printed(cluster: Cluster, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(records.remote, "reach", lambda work: asyncio.run(work(cluster)))
    assert main(["report", "digits", "-n", "a", "-o", "-", *(["--json"] if kind == "json" else [])]) == 0
    return capsys.readouterr().out


def test_data_of_the_report_have_what_the_job_has_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(Cluster(USAGE), "json", monkeypatch, capsys))
    assert found["usage"] == {
        "until_unix_s": 1767225600.0,
        "device_seconds": 1284.0,
        "energy_J": 162871.3,
        "energy_source": "Mixed",
        "cost_usd": 0.31,
        "carbon_g": 21.4,
    }
    parsed = Document.parse(json.dumps(found))  # The exports of dltrain read the file.
    assert parsed.usage is not None and parsed.usage.cost_usd == 0.31
    assert parsed.model_copy(update={"usage": None}) == document()


def test_page_of_the_report_has_what_the_job_has_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ElementTree.fromstring(printed(Cluster(USAGE), "html", monkeypatch, capsys))
    figures = root.find(".//dl")
    assert figures is not None
    shown = {each[0].text: each[1].text for each in figures}
    assert shown["cost of all attempts"] == "$0.31" and shown["CO2 equivalent"] == "21.4 g"
    assert (shown["energy of all attempts"] or "").startswith("163 kJ by counters and by the model")
    assert shown["devices, times their time"] == "21m24s"


def test_carbon_that_nobody_counts_is_not_shown() -> None:
    usage = usage_of({"status": {"usage": {k: v for k, v in USAGE.items() if k != "carbonGrams"}}})
    assert "CO2" not in text_with_usage(page(document()), "html", usage)
    assert json.loads(text_with_usage("{}", "json", usage))["usage"]["carbon_g"] is None


@pytest.mark.parametrize("kind", ["json", "html"])
@pytest.mark.parametrize(
    "cluster",
    [Cluster(None), Cluster(USAGE, forbidden=True), Cluster({"energySource": "of a later release"})],
    ids=["no usage", "job not readable", "usage not readable"],
)
def test_report_without_usage_is_unchanged(
    kind: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = page(document()) if kind == "html" else document().to_json()
    assert printed(cluster, kind, monkeypatch, capsys) == stored
