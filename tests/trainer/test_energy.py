"""Energy by counters that may not be there."""

from pathlib import Path

import pytest
import torch

from dltrain import energy
from dltrain.energy import Meter, Packages, meter
from dltrain.messages import Energy


def rapl(root: Path, name: str, label: str, counted_uJ: int, span_uJ: int = 1000) -> Path:
    """A domain as Linux lays it out (Documentation/power/powercap)."""
    (root / name).mkdir(exist_ok=True)
    for file, text in (("name", label), ("energy_uj", counted_uJ), ("max_energy_range_uj", span_uJ)):
        (root / name / file).write_text(f"{text}\n")
    return root


def test_cpu_packages_are_added_up_and_go_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 900)
    rapl(tmp_path, "intel-rapl:1", "package-1", 100)
    rapl(tmp_path, "intel-rapl:0:0", "core", 5)  # a part of the package
    rapl(tmp_path, "intel-rapl:2", "psys", 7)  # and what packages are a part of
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    made = meter(torch.device("cpu"), 0)
    assert made is not None and made.used() == Energy(joules=0, source="RAPL")
    rapl(tmp_path, "intel-rapl:0", "package-0", 50)
    rapl(tmp_path, "intel-rapl:1", "package-1", 300)
    assert made.used() == Energy(joules=350e-6, source="RAPL")
    assert meter(torch.device("cpu"), 1) is None, "a node is counted once a pod"
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert made.used() is None


def test_what_cannot_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    assert meter(torch.device("cpu"), 0) is None
    with pytest.raises(OSError, match="no-such-library"):
        energy._gpu("GPU-0", "no-such-library.so")
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()  # which root cannot read either
    assert meter(torch.device("cpu"), 0) is None
    with pytest.raises(OSError, match="intel-rapl"):
        Meter("RAPL", Packages(tmp_path))
