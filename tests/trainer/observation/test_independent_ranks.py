"""Tests of the line in the log about ranks that train independently of each other."""

from pathlib import Path

import pytest

from dltrain.observation.observer import ALONE
from support.trainer.observed_scripts import loop, observed

GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "u-1", "RANK": "0"}


@pytest.mark.parametrize(
    ("begin", "env", "said"),
    [
        ("", {**TORCHRUN, "WORLD_SIZE": "2"}, True),
        ("", {**TORCHRUN, "WORLD_SIZE": "1"}, False),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, False),
        (f"import torch.distributed as dist; {GROUP}\n", {**TORCHRUN, "WORLD_SIZE": "2"}, False),
    ],
    ids=["two ranks", "one rank", "MPI", "process group"],
)
def test_script_without_a_process_group_is_named_if_it_has_several_ranks(
    begin: str, env: dict[str, str], said: bool, tmp_path: Path
) -> None:
    """Fixed bug: a script for one process was started on two nodes, trained twice, and nothing said so."""
    _, ended = observed(tmp_path, begin + loop(steps=4), **env)
    assert ended.stderr.count(ALONE.format(2)) == said
