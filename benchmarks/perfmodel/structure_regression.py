"""Regress step time and peak memory of random networks on their structure, and score the fit on unseen structures.

    python -m benchmarks.perfmodel.structure_regression [--rows FILE] [--structures 96] [--seconds 150] [--refit]
        [--json]

The networks are the CNNs and transformers of ``dljob probe --structures``. The benchmark trains each for a few steps in
its own process with one thread, by the code of the probe. It regresses the CPU seconds of a step and the growth of the
process's memory on features of the layer table. Each structure is predicted from the others (five folds), then the
larger half from the smaller one, compared with the roofline of the data sheet. Last it predicts the built-in models,
which are not part of the fit. ``--refit`` prints the constants of ``dljob.perf.workload.structure``, from which the
operator derives the CPU and memory requests of pods.

``--rows`` stores measurements. Structures in the file are not measured again, so an interrupted run can continue.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.perfmodel.models.positive_fit import positive_fit
from benchmarks.perfmodel.scoring.scoring import Floats, ape, mean, median, over_workloads, p90
from benchmarks.perfmodel.scoring.table import Cell, Table, machine
from torch import nn
from torch.nn.functional import cross_entropy

from dlcontract.hardware import ReferenceNet
from dlcontract.structures import MIN_STRUCTURES, structures
from dljob.calibrate.hardware import workload_of
from dljob.cluster import catalogue
from dljob.perf.resources import memory
from dljob.perf.step.compute import regressed, roofline
from dljob.perf.workload import structure
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.workload import Workload, builtin
from dltrain.hardware_probe.structures import first_step, in_own_process, prepare, resident_KiB
from dltrain.models import InputShape, build

Terms = dict[str, float]
FOLDS = 5
BUILT_IN = (
    ("mlp", "digits", (8, 512)),
    ("digits-cnn", "digits", (8, 96)),
    ("lenet", "synthetic-images", (8, 96)),
    ("gpt-mini", "synthetic-tokens", (2, 8)),
    ("resnet18", "synthetic-images", (2, 8)),
)


@dataclass(frozen=True)
class Measured:
    cpu_s: float
    """CPU time of a step."""
    grown_nbytes: int
    """Peak memory of the process minus its memory before the model was built."""


def measured(make: Callable[[], Callable[[], None]]) -> Measured:
    """Measure a step in a forked process, as the hardware probe does. ``make``: see ``in_own_process``.

    This process has imported PyTorch but computed nothing, because PyTorch's threads do not survive a fork.
    """
    cpu_s, grown_KiB, _ = in_own_process(make)
    if not cpu_s:
        raise SystemExit("a measuring process exited early; it may have run out of memory")
    return Measured(cpu_s, 1024 * grown_KiB)


def of_built_in(name: str, dataset: str, batch: int) -> Callable[[], None]:
    """Return a training step like the trainer's: SGD with momentum; gradient buffers persist between steps."""
    data, tokens = DATASETS[dataset], dataset == "synthetic-tokens"
    shape = (batch, *data.shape)
    x = torch.randint(0, data.classes, shape) if tokens else torch.randn(shape)
    y = torch.randint(0, data.classes, shape if tokens else (batch,))
    model: nn.Module = build(name, InputShape(data.shape, data.classes, tokens))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        logits = model(x)
        cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def key_of(net: ReferenceNet) -> str:
    """Return a network as text, by which the rows of a file name it."""
    return json.dumps([net.shape, net.layers, net.batches])


def collected(count: int, budget_s: float, file: Path | None) -> tuple[list[ReferenceNet], list[Measured]]:
    """Measure the first ``count`` networks, or as many as the budget allows.

    ``file``: measurements of earlier runs, which are not measured again; new ones are appended. Rows of releases that
    drew other networks are ignored.
    """
    rows: dict[str, Measured] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[json.dumps(row["structure"])] = Measured(**row["measured"])
    began = time.perf_counter()
    wanted = structures(count)
    for net in wanted:
        key = key_of(net)
        if key in rows or time.perf_counter() - began > budget_s:
            continue
        rows[key] = measured(partial(first_step, net))
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"structure": json.loads(key), "measured": vars(rows[key])}) + "\n")
    done = [net for net in wanted if key_of(net) in rows]
    if len(done) < MIN_STRUCTURES:
        raise SystemExit(
            f"found {len(done)} measured structures; expected at least {MIN_STRUCTURES}. Increase --seconds."
        )
    return done, [rows[key_of(net)] for net in done]


def fitted(terms: Sequence[Terms], amounts: Floats) -> dict[str, float]:
    """Return the nonnegative coefficients of a robust least-squares fit of relative errors."""
    names = list(terms[0])
    design = np.array([[row[name] for name in names] for row in terms])
    return dict(zip(names, positive_fit(design, amounts).tolist(), strict=True))


def predicted(train: Sequence[Terms], amounts: Floats, rows: Sequence[Terms]) -> Floats:
    coefficients = fitted(train, amounts)
    return np.array([structure.total(row, coefficients) for row in rows])


def folded(terms: Sequence[Terms], amounts: Floats) -> Floats:
    """Predict each row from a fit without its fold."""
    found, fold = np.zeros(len(terms)), np.arange(len(terms)) % FOLDS
    for f in range(FOLDS):
        rest = [row for row, k in zip(terms, fold, strict=True) if k != f]
        found[fold == f] = predicted(rest, amounts[fold != f], [r for r, k in zip(terms, fold, strict=True) if k == f])
    return found


def pairs_of(nets: Iterable[ReferenceNet]) -> list[tuple[Workload, int]]:
    """Return workload and batch size of each network."""
    return [(workload_of(net), net.batches[0]) for net in nets]


def time_row(workload: Workload, batch: int) -> Terms:
    return {**structure.host_terms(workload), **structure.time_terms(workload, batch)}


def table_nbytes(workload: Workload, batch: int) -> float:
    """Predict the memory from the layer table alone."""
    return memory.fixed_nbytes(workload) + batch * memory.sample_nbytes(workload)


def scored(quantity: str, unit: str, groups: dict[str, dict[str, tuple[Floats, Floats]]]) -> Table:
    """Return a table of errors. ``groups``: group → method → (measured, predicted)."""
    rows: list[tuple[Cell, ...]] = []
    for group, methods in groups.items():
        for method, (found, forecast) in methods.items():
            errors = ape(found, forecast)
            figures = [over_workloads([errors], m) for m in (mean, median, p90)]
            rows.append((method, group, len(errors), *figures, float(np.median(forecast / found))))
    return Table(f"{quantity}, % ({unit})", ("method", "scored on", "n", "mean", "median", "p90", "bias"), tuple(rows))


def tables(nets: list[ReferenceNet], rows: list[Measured], known: list[tuple[Workload, int, Measured]]) -> list[Table]:
    """Score step times, memory, and the memory requests of pods."""
    pairs = pairs_of(nets)
    cpu_s = np.array([row.cpu_s for row in rows])
    grown = np.array([float(row.grown_nbytes) for row in rows])
    times = [time_row(*pair) for pair in pairs]
    growths = [structure.growth_terms(*pair) for pair in pairs]
    core = catalogue.cpu("cpu", 1.0)
    roof = np.array([roofline(w, core).seconds(b) for w, b in pairs])
    flops = np.array([w.flops_per_sample * b for w, b in pairs])
    table = np.array([table_nbytes(*pair) for pair in pairs])
    order = np.argsort(flops)
    small, large = order[: len(order) // 2], order[len(order) // 2 :]

    def at(values: Sequence[Terms], index: Iterable[int]) -> list[Terms]:
        return [values[int(i)] for i in index]

    def beyond(terms: Sequence[Terms], amounts: Floats) -> Floats:
        return predicted(at(terms, small), amounts[small], at(terms, large))

    rate = np.median(cpu_s / flops)
    base = np.median(grown - table)
    their_s = np.array([m.cpu_s for *_, m in known])
    their_nbytes = np.array([float(m.grown_nbytes) for *_, m in known])
    time_groups = {
        "unseen": {
            "regression": (cpu_s, folded(times, cpu_s)),
            "roofline": (cpu_s, roof),
            "operations": (cpu_s, rate * flops),
        },
        "larger half": {"regression": (cpu_s[large], beyond(times, cpu_s)), "roofline": (cpu_s[large], roof[large])},
        "built-in": {
            "regression": (their_s, predicted(times, cpu_s, [time_row(w, b) for w, b, _ in known])),
            "in dljob": (their_s, np.array([regressed(w, core).seconds(b) for w, b, _ in known])),
            "roofline": (their_s, np.array([roofline(w, core).seconds(b) for w, b, _ in known])),
        },
    }
    their_growth = [structure.growth_terms(w, b) for w, b, _ in known]
    memory_groups = {
        "unseen": {"regression": (grown, folded(growths, grown)), "layer table": (grown, base + table)},
        "larger half": {
            "regression": (grown[large], beyond(growths, grown)),
            "layer table": (grown[large], (base + table)[large]),
        },
        "built-in": {
            "regression": (their_nbytes, predicted(growths, grown, their_growth)),
            "layer table": (their_nbytes, np.array([base + table_nbytes(w, b) for w, b, _ in known])),
        },
    }
    return [
        scored("CPU time of a step", "bias: predicted / measured", time_groups),
        scored("Growth of memory", "bias: predicted / measured", memory_groups),
        requests("unseen", folded(growths, grown), grown),
    ]


def requests(group: str, forecast: Floats, found: Floats) -> Table:
    """Score how often ``GROWTH_MARGIN`` over the prediction is sufficient, and its mean excess."""
    limit = memory.GROWTH_MARGIN * forecast
    excess = (limit - found) / (memory.PROCESS_NBYTES + found)
    return Table(
        "Memory requested for a rank, from the regression",
        ("scored on", "n", "sufficient, %", "mean excess, %"),
        ((group, len(forecast), float(100 * np.mean(excess >= 0)), float(100 * excess.mean())),),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--structures", type=int, default=96)
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="time limit for measuring structures; the rest is skipped"
    )
    parser.add_argument("--rows", type=Path, help="file of measurements to create or extend, one JSON object per line")
    parser.add_argument("--refit", action="store_true", help="print the constants of dljob.perf.workload.structure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    base_KiB = resident_KiB("VmRSS")
    nets, rows = collected(options.structures, options.seconds, options.rows)
    known = [
        (builtin(name, dataset), batch, measured(lambda n=name, d=dataset, b=batch: of_built_in(n, d, b)))  # type: ignore[misc]
        for name, dataset, batches in BUILT_IN
        for batch in batches
    ]
    found = tables(nets, rows, known)
    pairs = pairs_of(nets)
    times = fitted([time_row(*pair) for pair in pairs], np.array([row.cpu_s for row in rows]))
    growth = fitted([structure.growth_terms(*pair) for pair in pairs], np.array([float(r.grown_nbytes) for r in rows]))
    constants = {
        "HOST_S": {name: times[name] for name in structure.HOST_S},
        "TIME_S": {name: times[name] for name in structure.TIME_S},
        "GROWTH": growth,
    }
    if options.json:
        result = {"machine": machine(), "process_MiB": base_KiB / 2**10, "constants": constants}
        print(json.dumps(result | {"tables": [table.as_dict() for table in found]}))
        return
    print("\n\n".join(table.text() for table in found))
    print(f"\nprocess without a model {base_KiB / 2**10:.0f} MiB; PyTorch {torch.__version__}, one thread\n{machine()}")
    if options.refit:
        for name, values in constants.items():
            print(f"{name} = {{" + ", ".join(f'"{k}": {v:.3g}' for k, v in values.items()) + "}")


if __name__ == "__main__":
    main()
