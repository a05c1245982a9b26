"""The random networks of the hardware probe: their modules match their layer tables, and each is measured alone."""

import os
import sys

import pytest

from dlcontract.hardware import MeasuredStructures, ReferenceNet
from dlcontract.structures import structures
from support.trainer.ranks import environment, run_apart

torch = pytest.importorskip("torch")

from dltrain.hardware_probe import networks  # noqa: E402

SMALL = [net for net in structures(48) if net.batches[0] <= 16]
MEASURE = """
from dlcontract.hardware import ReferenceNet
from dltrain.hardware_probe import structures
structures.BUDGET_S = 0.01
dense = ReferenceNet((8,), (("linear", 4),), (2,), ())
tokens = ReferenceNet((8,), (("embedding", 16, 32), ("block", 2), ("layer_norm",), ("linear", 16)), (2,), ())
broken = ReferenceNet((8,), (("of a later release",),), (2,), ())
structures.structures = lambda count: (dense, broken, tokens)
for limit_s in (60.0, 0.0):
    found, note = structures.measured(3, limit_s)
    print(found.model_dump_json(), note, sep="|")
"""


@pytest.mark.parametrize("index", range(0, len(SMALL), 4))
def test_a_module_has_the_parameters_of_its_layer_table(index: int) -> None:
    from dljob.calibrate.hardware import workload_of

    net = SMALL[index]
    assert sum(p.numel() for p in networks.module(net).parameters()) == workload_of(net).parameters


def test_a_network_for_tokens_trains_on_the_next_token_of_every_position() -> None:
    net = ReferenceNet((8,), (("embedding", 16, 32), ("block", 2), ("layer_norm",), ("linear", 16)), (2,), ())
    assert networks.module(net)(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 16)
    networks.training_step(net, 2, torch.device("cpu"), "FP32")()


def test_each_network_is_measured_in_its_own_process_and_a_failed_one_is_left_out() -> None:
    """Runs in a fork of the zygote, because forks hang after PyTorch has computed with threads."""
    ended = run_apart("-c", MEASURE, env=environment(PYTHONPATH=os.pathsep.join(sys.path)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    (text, note), (later, why) = (line.split("|") for line in lines)
    found = MeasuredStructures.model_validate_json(text)
    assert found.s[0] > 0
    assert found.s[1] == 0 == found.grown_KiB[1]
    assert found.s[2] > 0 < found.grown_KiB[2]
    assert "1 of 3 networks were not measured" in note
    assert not any(MeasuredStructures.model_validate_json(later).s), "no time was left"
    assert "3 of 3" in why
