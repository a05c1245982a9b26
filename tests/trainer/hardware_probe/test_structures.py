"""The random networks of the hardware probe: their modules match their layer tables, and each is measured alone."""

import os
import sys
from pathlib import Path

import pytest

from dlcontract.hardware import MeasuredStructures, ReferenceNet
from dlcontract.structures import structures
from support.trainer.ranks import environment, run_apart

torch = pytest.importorskip("torch")

from dltrain.hardware_probe import networks  # noqa: E402
from dltrain.hardware_probe import structures as measuring  # noqa: E402
from dltrain.hardware_probe.structure_ranks import RANK_NBYTES, rank_counts, timed  # noqa: E402
from dltrain.hardware_probe.structure_ranks import measure as measure_on_ranks  # noqa: E402
from dltrain.protocol.rank_messages import Energy  # noqa: E402

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


@pytest.mark.parametrize(
    ("cores", "free_nbytes", "counts"),
    [
        (0.5, None, []),
        (1, None, []),
        (2, None, [2]),
        (3, None, [2, 3]),
        (4, 2**40, [2, 4]),
        (96, None, [2, 16, 96]),
        (96, 4 * RANK_NBYTES, [2, 4]),
        (96, RANK_NBYTES, []),
    ],
)
def test_numbers_of_ranks_are_those_that_the_node_has_cores_and_memory_for(
    cores: float, free_nbytes: int | None, counts: list[int]
) -> None:
    assert rank_counts(cores, free_nbytes) == counts


class Counter:
    """A counter of joules that rises by ``joules`` while a network trains; None: it cannot be read."""

    def __init__(self, joules: float | None) -> None:
        self._joules = joules

    def used(self) -> Energy | None:
        return None if self._joules is None else Energy(joules=self._joules, source="RAPL")


@pytest.mark.parametrize(
    ("counter", "is_known"), [(Counter(2.0), True), (Counter(None), False), (None, False), (Counter(0.0), False)]
)
def test_power_is_measured_or_none(monkeypatch: pytest.MonkeyPatch, counter: Counter | None, is_known: bool) -> None:
    monkeypatch.setattr(measuring.energy, "meter", lambda *_: counter)
    seconds, watts = timed(lambda own: 1.0, measures_power=True)
    assert seconds >= 0
    assert (watts is not None) is is_known
    assert watts is None or watts > 0
    assert timed(lambda own: 1.0, measures_power=False)[1] is None


def test_unknown_power_is_left_out_of_the_document() -> None:
    assert measuring.watts_of([None, None]) == ()
    assert measuring.watts_of([None, 3.5]) == (0.0, 3.5)


@pytest.mark.mpi
def test_networks_train_on_two_ranks(tmp_path: Path) -> None:
    found, note = measure_on_ranks(6, 2, tmp_path, 120.0)
    assert note is None
    [part] = found
    assert part.ranks == 2
    assert len(part.s) == 2 and all(part.s)


def test_ranks_that_do_not_start_leave_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    found, note = measure_on_ranks(24, 4, tmp_path, 60.0)
    assert found == () and "structures on 2 ranks" in (note or "")
    found, note = measure_on_ranks(24, 4, tmp_path, 60.0, RANK_NBYTES)
    assert found == () and "free memory" in (note or "")
    found, note = measure_on_ranks(24, 4, tmp_path, 0.0)
    assert found == () and "no time was left for 2 ranks" in (note or "")
