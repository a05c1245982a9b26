"""The race of a project: it chooses clearly better settings, the same on all ranks, and gives up if time is short."""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from dljob.suggest.recommendation.model import Candidate, Settings
from dljob.suggest.subject import Options, Subject, read_subject
from dljob.suggest.trial import write
from support.projects import metrics, script, shorten

MAX_LINES = 150
GOOD, BAD = Candidate(0.1, 0.0, 0.0), Candidate(0.1, 100.0, 0.0)
"""Settings with a suitable penalty, and with one that leaves no weights."""
DIVERGING = Candidate(1e30, 0.0, 0.0)


class Ranks:
    """Stands in for ``dltrain``'s trainer of one rank. ``other``: changes what all ranks together have summed."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, size: int = 1, other: Callable[[list[float]], list[float]] = list, stored: int | None = None):
        self.size, self._other, self._stored, self.sums = size, other, stored, 0

    def busy(self, what: str, limit_s: float) -> None:
        assert limit_s > 0

    def keep(self, race: dict[str, int]) -> None:
        if self._stored is not None:
            race["candidate"] = self._stored

    def sum(self, values: Sequence[float]) -> list[float]:
        self.sums += 1
        return self._other(list(values))


def line(path: Path) -> Path:
    """Write 120 rows whose target is a number in a line with two others."""
    draw = random.Random(2)
    rows = ((draw.random(), draw.random()) for _ in range(120))
    path.write_text("a,b,target\n" + "".join(f"{a:.4f},{b:.4f},{2 * a - b:.4f}\n" for a, b in rows), encoding="utf-8")
    return path


def settings_of(subject: Subject, *candidates: Candidate) -> Settings:
    first, *rivals = candidates
    own = replace(subject.models(None)[0], race=True, rivals=tuple(rivals), epochs=20)
    return replace(own, learning_rate=first.learning_rate, penalty=first.penalty, dropout=first.dropout)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return read_subject(Options(line(tmp_path / "data.csv")))


@pytest.fixture
def raced(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Return a function that runs the race of a project between these candidates, and returns the chosen settings."""

    def run(t: Ranks, *candidates: Candidate, left_s: float = 0.0) -> dict[str, float]:
        project = subject.project(settings_of(subject, *candidates), None)
        found = {name: module(name, project) for name in ("data", "model")}
        for name, own in found.items():
            monkeypatch.setitem(sys.modules, name, own)
        data, race = found["data"], module("race", project)
        rows = data.parts(subject.source.data, 0)[0]
        own = data.Preprocessing.fit(rows)
        x, y = (torch.from_numpy(part) for part in (own.inputs(rows), own.targets(rows)))
        network = found["model"].Network(x.shape[1], 1)
        opt = torch.optim.Adam(network.parameters())
        chosen: dict[str, float] = race.race(t, network, opt, rows, x, y, None, 16, 20, 0, left_s)
        assert opt.param_groups[0]["lr"] == chosen["learning_rate"]
        return chosen

    return run


def module(name: str, project: Mapping[str, str]) -> Any:
    found = ModuleType(name)
    exec(compile(project[f"{name}.py"], f"{name}.py", "exec"), found.__dict__)
    return found


def test_clearly_better_settings_win(raced: Callable[..., dict[str, float]]) -> None:
    t = Ranks()
    assert raced(t, BAD, replace(BAD, penalty=50.0), GOOD)["penalty"] == GOOD.penalty
    assert t.sums == 2, "one for each round"


def test_the_recommended_settings_win_unless_a_rival_is_clearly_better(raced: Callable[..., dict[str, float]]) -> None:
    assert raced(Ranks(), GOOD, BAD, GOOD)["penalty"] == GOOD.penalty
    nearly = replace(GOOD, penalty=1e-12)
    assert raced(Ranks(), nearly, GOOD)["penalty"] == nearly.penalty


def test_settings_that_diverge_lose(raced: Callable[..., dict[str, float]]) -> None:
    assert raced(Ranks(), GOOD, DIVERGING)["learning_rate"] == GOOD.learning_rate
    assert raced(Ranks(), DIVERGING, GOOD)["learning_rate"] == GOOD.learning_rate


def test_a_race_without_time_ends_at_once_with_the_recommended_settings(raced: Callable[..., dict[str, float]]) -> None:
    t = Ranks()
    assert raced(t, BAD, GOOD, left_s=1e-9)["penalty"] == BAD.penalty
    assert t.sums == 1


def test_a_lost_rank_leaves_the_recommended_settings(raced: Callable[..., dict[str, float]]) -> None:
    """Rank 1 has trained every second candidate. Without it, the losses of these are 0, which is no low loss."""
    assert raced(Ranks(size=2), BAD, GOOD)["penalty"] == BAD.penalty


def test_a_restart_keeps_the_settings_of_its_checkpoint_without_a_race(raced: Callable[..., dict[str, float]]) -> None:
    t = Ranks(stored=1)
    assert raced(t, GOOD, BAD)["penalty"] == BAD.penalty
    assert t.sums == 0


def test_the_project_has_a_short_script_of_its_own_and_the_job_has_it_too(subject: Subject, tmp_path: Path) -> None:
    project = subject.project(settings_of(subject, BAD, GOOD), 300.0)
    for name in ("train.py", "race.py"):
        compile(project[name], name, "exec")
        assert len(project[name].splitlines()) <= MAX_LINES and "$" not in project[name]
    scripts, _ = yaml.safe_load_all(project["job.yaml"])
    assert scripts["data"]["race.py"] == project["race.py"]
    assert "| `race.py` |" in project["README.md"] and "--from-file=race.py" in project["README.md"]
    without = subject.project(subject.models(None)[0], 300.0)
    assert "race.py" not in without and not any("race" in text for text in without.values())


def test_a_table_without_the_target_is_named(subject: Subject, tmp_path: Path) -> None:
    """Fixed bug: a table without this column, in DLJOB_DATASET, ended with a traceback of NumPy."""
    data = module("data", subject.project(subject.models(None)[0], None))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(
        SystemExit, match=r"other.csv: found no row with a value of 'target'; expected a table with this"
    ):
        data.read(tmp_path / "other.csv")


def test_the_training_takes_the_settings_that_the_race_chose(subject: Subject, tmp_path: Path) -> None:
    write(tmp_path / "project", subject, settings_of(subject, BAD, replace(BAD, penalty=50.0), GOOD), None)
    shorten(tmp_path / "project", 20)
    assert "race: {" in script(tmp_path / "project", "train.py")
    found = metrics(tmp_path / "project")
    assert found["race"] == {"learning_rate": 0.1, "penalty": 0, "dropout": 0}
    assert found["r2"] > 0.9, "BAD leaves no weights, so it predicts the mean: 0"
