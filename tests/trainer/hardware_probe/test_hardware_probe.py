"""Tests of the hardware probe: its networks, its measurements of real disks and links, and its document."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dlcontract.hardware import MAX_NBYTES, MAX_TIMED, REFERENCE_NETS, HardwareMeasure, LinkRate, TimedStep

torch = pytest.importorskip("torch")

from dltrain.hardware_probe import disk, link, machine, memory, networks, node_link  # noqa: E402
from dltrain.hardware_probe.__main__ import main  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", REFERENCE_NETS)
def test_each_network_trains(name: str) -> None:
    net = REFERENCE_NETS[name]
    output = networks.module(net)(torch.zeros(2, *net.shape))
    assert output.shape == (2, 10)
    networks.training_step(net, 2, CPU, "FP32")()
    networks.training_step(net, 2, CPU, "BF16")()


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(0.5, [1]), (1, [1]), (2, [1, 2]), (6.5, [1, 2, 4, 6]), (96, [1, 4, 16, 32, 96])],
)
def test_core_counts_reach_from_one_core_to_all(cores: float, expected: list[int]) -> None:
    assert networks.core_counts(cores) == expected


def test_no_node_has_more_cases_than_the_document_holds() -> None:
    several = sum(net.scales for net in REFERENCE_NETS.values()) * (networks.MAX_CORE_COUNTS - 1)
    assert sum(len(net.batches) for net in REFERENCE_NETS.values()) + several <= MAX_TIMED


@pytest.mark.parametrize(
    ("long_s", "fits", "expected"), [(1e9, 64, [4, 64]), (1e9, 4096, [4, 64, 4096]), (0.0, 64, [4])]
)
def test_batches_on_a_gpu_grow_until_one_takes_long_or_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, long_s: float, fits: int, expected: list[int]
) -> None:
    """Seen on an H200: with the largest batch until then, the host needed most of the time of all reference networks."""

    def step_of(batch: int) -> Callable[[], None]:
        if batch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    monkeypatch.setattr(networks, "LONG_STEP_S", long_s)
    found = list(networks.gpu_cases("conv", (4, 64, 4096), "BF16", step_of))
    assert [case.batch for case in found] == expected
    assert {(case.net, case.cores, case.precision) for case in found} == {("conv", 1, "BF16")}


def test_the_fullest_document_fits_into_a_termination_message() -> None:
    step = TimedStep(net="small-dense", batch=4096, cores=128, s=1.2345e-05, precision="FP32")
    full = HardwareMeasure(
        device="x" * 96,
        cores=127.5,
        node_cores=128,
        steps=(step,) * MAX_TIMED,
        notes=("a note that is long " * 50,) * 8,
    )
    assert len(full.to_json().encode()) <= MAX_NBYTES
    again = HardwareMeasure.parse(full.to_json())
    assert len(again.steps) >= 36, "notes are left out first"


def test_a_disk_is_measured_past_the_page_cache_or_not_at_all(tmp_path: Path) -> None:
    found, note = disk.disk_rates(tmp_path)
    assert found is not None
    assert found.write_Bps is not None
    assert found.direct == (found.read_Bps is not None) == (note is None)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_write_permission_yields_a_note(tmp_path: Path) -> None:
    found, note = disk.disk_rates(tmp_path / "missing")
    assert found is None
    assert note is not None
    assert "not measured" in note


def serving() -> int:
    """Serve peers in a thread, and return the port. Nobody else can take it between two calls."""
    server = socket.create_server(("127.0.0.1", 0))
    port: int = server.getsockname()[1]
    threading.Thread(target=link.serve, args=(server, 8.0), daemon=True).start()
    return port


def test_a_link_is_measured_between_two_processes() -> None:
    found = link.measure("127.0.0.1", serving())
    assert 0 < found.latency_s < 1
    assert found.Bps > 1e6


def test_only_the_link_is_measured_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peer", f"127.0.0.1:{serving()}", "--only-link"]) == 0
    found = LinkRate.model_validate_json(capsys.readouterr().out)
    assert 0 < found.latency_s < 1 and found.Bps > 1e6


def test_a_peer_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["--peer", f"127.0.0.1:{port}", "--only-link"]) == 1
    assert "link to 127.0.0.1: Connection refused" in capsys.readouterr().out


def test_a_memory_copy_has_a_rate_for_each_core_count() -> None:
    found = memory.memory_rates(CPU, 2.0, 2**24)
    assert [rate.cores for rate in found] == [1, 2]
    assert all(rate.Bps > 1e6 for rate in found)
    torch.set_num_threads(1)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t:  A   Processor\n")
    assert machine.processor(file) == "A Processor"
    assert machine.processor(tmp_path / "missing") == os.uname().machine


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peer", "host"],
        ["--peer", "host:0"],
        ["--only-link"],
        ["--scratch", "/missing"],
        ["--structures", "3"],
        ["--structures", "1000"],
        ["--device", "gpu"],
    ],
)
def test_unusable_options_have_one_line_and_their_own_exit_code(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[-1] == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(arguments) == 64
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert arguments[0] in error


@pytest.mark.mpi
@pytest.mark.patient
def test_two_ranks_of_this_node_exchange_messages(tmp_path: Path) -> None:
    found, note = node_link.measure(tmp_path)
    assert note is None
    assert found is not None
    assert 0 < found.latency_s < 1


@pytest.mark.long
def test_the_program_prints_its_document_last_and_needs_only_its_scratch_folder(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o777)
    command = [sys.executable, "-m", "dltrain.hardware_probe", "--device", "cpu", "--scratch", str(scratch)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd="/")
    assert len(ran.stdout.splitlines()[-1]) <= MAX_NBYTES
    found = HardwareMeasure.parse(ran.stdout.splitlines()[-1])
    assert {step.net for step in found.steps} == set(REFERENCE_NETS)
    assert not list(scratch.iterdir())
