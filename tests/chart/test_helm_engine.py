"""Tests of hack/helm: options of Helm that the documentation uses, on a simulated release."""

import argparse
from pathlib import Path
from typing import Any

import pytest

import helm_engine

Json = dict[str, Any]


class _Release:
    """A release with the values that were set for it. It records the arguments of an upgrade."""

    def __init__(self, given: Json) -> None:
        self._given = given
        self.upgraded: Json = {}

    def get_values(self, name: str, *, all_values: bool = False) -> Json:
        return self._given

    def upgrade(self, chart: Path, name: str, given: Json, **options: Any) -> Json:
        self.upgraded = {"given": given, **options}
        return {"revision": 2}


def _parsed(*words: str) -> argparse.Namespace:
    return helm_engine._parser().parse_args(["upgrade", "dljob", "charts/dljob", *words])


@pytest.mark.parametrize(
    ("option", "given", "reset", "reuse"),
    [
        (None, {"image": {"tag": "new"}}, False, False),
        ("--reuse-values", {"image": {"tag": "new"}}, False, True),
        ("--reset-then-reuse-values", {"replicas": 2, "image": {"repository": "mine", "tag": "new"}}, True, False),
    ],
)
def test_values_of_an_upgrade(option: str | None, given: Json, reset: bool, reuse: bool) -> None:
    """Fixed bug: hack/helm rejected --reset-then-reuse-values, with which the documentation upgrades dljob."""
    release = _Release({"replicas": 2, "image": {"repository": "mine", "tag": "old"}})
    args = _parsed(*([option] if option else []), "--set-string", "image.tag=new")
    helm_engine._upgrade(release, args, helm_engine.values(args.values, args.sets), {})
    assert release.upgraded == {"given": given, "reset_values": reset, "reuse_values": reuse}


def test_values_are_either_reused_or_reset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parsed("--reuse-values", "--reset-then-reuse-values")
    assert "not allowed with" in capsys.readouterr().err
