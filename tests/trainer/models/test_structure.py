"""Tests of generated networks against their layer tables and predicted steps, and of the structure regression."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.trainer.ranks import run

torch = pytest.importorskip("torch")
FIELDS = {"layers": 3, "filters": 16, "dense": 256, "pixels": 32, "batch": 32}
MEASURE = f"""
import torch
from benchmarks.perfmodel.structures import Structure, measured, of_structure, prepare
torch.set_num_threads(1)
prepare()
found = [measured(lambda: of_structure(Structure(**{FIELDS}))) for _ in range(3)]
print(min(one.cpu_s for one in found), found[0].grown_nbytes)
"""
"""Runs in a new process, because forks hang after PyTorch has computed with threads. The minimum of three CPU times is
used, because other work on the machine and threads that wait for each other only add to the CPU time."""


def test_generated_network_matches_its_table_time_and_memory() -> None:
    from benchmarks.perfmodel.structures import Structure, drawn

    from dljob.perf.resources import memory
    from dljob.perf.workload import structure

    for one in drawn(8):
        assert sum(p.numel() for p in one.module().parameters()) == one.workload().parameters
    one = Structure(**FIELDS)
    ended = run([sys.executable, "-c", MEASURE], PYTHONPATH=os.pathsep.join(sys.path))
    assert ended.code == 0, ended.output
    cpu_s, grown_nbytes = map(float, ended.output.split()[-2:])
    predicted_s = structure.total(structure.time_terms(one.workload(), one.batch), structure.TIME_S)
    assert predicted_s / 10 < cpu_s < predicted_s * 10
    grown = structure.total(structure.growth_terms(one.workload(), one.batch), structure.GROWTH)
    assert grown / 3 < grown_nbytes < memory.GROWTH_MARGIN * grown


def test_regression_predicts_measurements_made_with_its_formula(tmp_path: Path) -> None:
    """The rows of a file are not measured again. If they follow the formula, unseen structures are predicted."""
    from benchmarks.perfmodel.structure_regression import tables
    from benchmarks.perfmodel.structures import collected, drawn

    from dljob.perf.workload import structure

    def cpu_s(one: Any) -> float:
        work = structure.time_terms(one.workload(), one.batch), structure.host_terms(one.workload())
        return structure.total(work[0], structure.TIME_S) + structure.total(work[1], structure.HOST_S)

    rows = tmp_path / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as out:
        for one in drawn(60):
            grown = structure.total(structure.growth_terms(one.workload(), one.batch), structure.GROWTH)
            measured = {"cpu_s": cpu_s(one), "grown_nbytes": int(grown)}
            out.write(json.dumps({"structure": asdict(one), "measured": measured}) + "\n")
    ones, found = collected(60, 0.0, rows)
    assert len(ones) == 60
    step, memory, asked = tables(ones, found, [(ones[0].workload(), ones[0].batch, found[0])])
    means = {(row[0], row[1]): row[3].value for table in (step, memory) for row in table.rows}
    assert means["regression", "unseen"] < 3 < means["roofline", "unseen"]
    assert asked.rows[0][2] == 100.0
