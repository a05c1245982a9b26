"""Tests of the code in docs/how-to/use-the-trained-model.md on the last checkpoint of a run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from dltrain.builtin import rank
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import USER_OBJECTS
from dltrain.checkpoint.user_objects import UserObjects
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_OK
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import ROOT


def test_code_of_the_page_loads_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded model has the accuracy that the run reported."""
    page = (ROOT / "docs/how-to/use-the-trained-model.md").read_text(encoding="utf-8")
    own, averaged, built_in = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    with Listener(tmp_path) as listener:
        monkeypatch.setenv(rank_messages.PLAN_ENV, write(make_plan(checkpoint=saving(tmp_path / "volume")), tmp_path))
        monkeypatch.setenv(rank_messages.SOCKET_ENV, listener.path)
        assert rank.main() == EXIT_OK
        listener.wait_for(rank_messages.Finished, 1)
    (finished,) = listener.of(rank_messages.Finished)
    folder = Path(finished.outcome.checkpoint or "")
    table = page.partition("### Built-in models")[0]
    files = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", table, re.MULTILINE))
    assert {name for names in files for name in re.findall(r"`(.+?)`", names)} == {p.name for p in folder.iterdir()}
    folder.rename(tmp_path / "step-0000000300")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(built_in, names)
    assert names["accuracy"] == finished.outcome.accuracy
    exec(own, {"make_model": lambda: names["build"]("mlp", names["digits"].shape)})
    user_objects, average = UserObjects(), AveragedModel(names["model"])
    for parameter in average.parameters():
        parameter.data.mul_(0.5)
    user_objects.add("ema", average)
    tensor_file.write(tmp_path / "step-0000000300" / USER_OBJECTS, user_objects.state()[1])
    exec(averaged, names)
    assert all(torch.equal(a, b) for a, b in zip(names["model"].parameters(), average.parameters(), strict=True))
