"""The run report as one HTML file without external resources: figures, plots and the values of the plots.

The file is also well-formed XML, so that tools can read its tables. Text from the run (messages, logs, names) is
escaped. A content security policy forbids scripts and requests.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from dlcontract import MAX_METRICS
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.held_out import findings, held_out
from dltrain.record.run_report.plots import Curve, Mark, bars, clean, lines, number, table

LINES = 8
"""Maximum number of ranks with a curve in a plot."""
BARS = 64
"""Maximum number of bars in a plot. If there are more ranks, the plot shows the most relevant ones."""
PARTS = ("computing", "communicating", "waiting", "reading data")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5d6b79; --grid: #dde3e9; --back: #fff; --box: #f4f6f8;
  --bad: #c62f3b; --c0: #1f6fc4; --c1: #c2570c; --c2: #2b8a4b; --c3: #8a4fc0; --c4: #a8761b; --c5: #0b8793;
  --c6: #c03f87; --c7: #66707a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --grid: #33404d; --back: #12181f;
  --box: #1b232c; --bad: #ff7a84; --c0: #6cb0ff; --c1: #ff9d57; --c2: #6dd58f; --c3: #c79bff; --c4: #e6bd5c;
  --c5: #4fd0dc; --c6: #ff8cc6; --c7: #a9b4bf; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } p { margin: .25rem 0; }
.soft, figcaption, dt { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: .6rem; }
dl div { background: var(--box); border-radius: 6px; padding: .5rem .75rem; } dd { margin: 0; font-size: 1.15rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.line { fill: none; stroke-width: 1.8; } .grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.mark { stroke: var(--bad); stroke-dasharray: 2 3; } .bad { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; } .key {
  display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem; }
table { border-collapse: collapse; font-size: .85rem; } td, th { text-align: left; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid var(--grid); vertical-align: top; } td { font-variant-numeric: tabular-nums; }
.cell { fill: var(--c0); } .cell.off { fill: var(--c1); } svg .on { fill: var(--ink); }
.even { stroke: var(--soft); stroke-dasharray: 4 4; } .findings { list-style: none; margin: 1rem 0; padding: 0; }
.findings li { background: var(--box); padding: .5rem .75rem; border-left: 4px solid var(--c1); border-radius: 4px;
  margin: .4rem 0; } .findings li.good { border-color: var(--c2); }
pre { white-space: pre-wrap; margin: .2rem 0; } .scroll { overflow-x: auto; } summary { cursor: pointer; }
""" + "".join(
    f".line.c{i} {{ stroke: var(--c{i}) }} .dot.c{i}, .bar.c{i} {{ fill: var(--c{i}) }} "
    f".key.c{i} {{ background: var(--c{i}) }}\n"
    for i in range(8)
)


def page(document: Document) -> str:
    """Return the content of the HTML file for a run report."""
    title = f"{document.namespace}/{document.job}"
    steps = f"{number(document.step)} of {number(document.steps)}" if document.steps else number(document.step)
    body = [
        f"<h1>{clean(title)}</h1>",
        f'<p class="soft">{clean(document.model)} on {clean(document.dataset or "its own data")}, '
        f"batch {number(document.global_batch)}, seed {document.seed}; {document.phase.value}, step {steps}; "
        f"began {_date(document.started_unix_s)}, as of {_date(document.updated_unix_s)}</p>",
        *findings(document),
        _figures(document),
        *held_out(document),
        "<h2>Training</h2>",
        f'<div class="plots">{"".join(_plots(document))}</div>',
        *_tables(document),
    ]
    return html_page(title, body)


def html_page(title: str, body: Iterable[str]) -> str:
    """Return an HTML file with this module's style. ``body``: escaped elements, such as those of ``plots``."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{clean(title)}</title><style>{_STYLE}</style></head>\n<body>{chr(10).join(body)}</body></html>\n"
    )


def _figures(document: Document) -> str:
    totals, outcome = document.totals, document.outcome
    accuracy = outcome.accuracy if outcome else document.evaluations[-1].accuracy if document.evaluations else None
    loss = (
        outcome.loss if outcome and outcome.loss is not None else document.points[-1].loss if document.points else None
    )
    steps = sum(point.steps for point in document.points)
    mean_s = sum(point.step_s * point.steps for point in document.points) / steps if steps else None
    rate = document.samples_per_s
    predicted_s = document.plans[-1].predicted_step_s if document.plans else None
    error = document.prediction_error
    noise = document.points[-1].noise_samples if document.points else None
    faults = ", ".join(f"{count} {reason}" for reason, count in sorted(totals.faults.items()))
    tiles = [
        ("accuracy, held out", None if accuracy is None else f"{100 * accuracy:.2f} %"),
        ("loss", None if loss is None else number(loss)),
        ("time since the start", duration(document.updated_unix_s - document.started_unix_s)),
        ("time in steps", duration(totals.training_s)),
        ("step, mean", None if mean_s is None else duration(mean_s)),
        ("throughput, mean", None if rate is None else f"{rate:.4g} samples/s"),
        ("throughput / step time", None if rate is None or not mean_s else f"{rate / mean_s:.4g} samples/s²"),
        ("step, predicted", None if predicted_s is None else duration(predicted_s)),
        ("prediction error", None if error is None else f"{100 * error:+.1f} %"),
        ("faults", faults or "none"),
        ("lost to faults", f"{duration(totals.down_s)}, {number(totals.steps_repeated)} repeated steps"),
        ("checkpoints", f"{totals.checkpoints}, of {size(totals.checkpoint_nbytes / (totals.checkpoints or 1))}"),
        ("stops without a checkpoint", str(totals.checkpoints_skipped) if totals.checkpoints_skipped else None),
        ("gradient noise scale", "not measured" if noise is None else f"{noise:.3g} samples"),
        ("skipped by the GradScaler", _skipped(totals.skipped_updates)),
        ("energy", _energy(document)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{clean(text)}</dd></div>" for name, text in tiles if text is not None)
    return f"<dl>{cells}</dl>"


def _skipped(updates: int | None) -> str | None:
    return None if updates is None else "no update" if not updates else f"{number(updates)} updates"


def _energy(document: Document) -> str:
    """Return a text with the measured energy and the names of the counters that measured it.

    RAPL measures whole CPUs. The pods' part is estimated by their part of the CPU time.
    """
    totals = document.totals
    if totals.energy_J is None:
        return "not readable: the pods cannot read a counter of NVML or RAPL"
    pods = {rank.place.split("/")[0] for rank in document.ranks}
    read = {rank.place.split("/")[0] for rank in document.ranks if rank.energy_J is not None}
    of = f", {len(read)} of {len(pods)} pods" if len(read) < len(pods) else ""
    whole = ", the pods' part by CPU time" if "RAPL" in totals.energy_sources else ""
    return f"{joules(totals.energy_J)} by {' and '.join(totals.energy_sources)}{of}{whole}"


def _plots(document: Document) -> Iterable[str]:
    points, faults = document.points, document.faults
    began = document.started_unix_s
    at_step = [Mark(fault.step, f"step {fault.step}: {fault.failure.reason}") for fault in faults]
    at_time = [Mark(fault.unix_s - began, f"{fault.failure.reason}: {fault.failure.message}") for fault in faults]

    def over(name: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(p.step, factor * value) for p in points if (value := getattr(p, name)) is not None]

    yield lines("Loss over steps", "step", "loss", [Curve("training loss", over("loss"))], at_step)
    accuracy = [(entry.step, 100 * entry.accuracy) for entry in document.evaluations]
    yield lines("Accuracy on held-out data", "step", "accuracy, %", [Curve("accuracy", accuracy)], at_step)
    for name in sorted({name for entry in document.metrics for name in entry.values})[:MAX_METRICS]:
        values = [(entry.step, entry.values[name]) for entry in document.metrics if name in entry.values]
        yield lines(f"{name}, logged by the script", "step", name, [Curve(name, values)], at_step)
    yield lines("Learning rate", "step", "learning rate", [Curve("learning rate", over("learning_rate"))], zero=True)
    noise = [Curve("noise scale of the run so far", over("noise_samples"))]
    yield lines("Gradient noise scale", "step", "samples", noise, zero=True)
    measured = Curve("measured", over("step_s", 1e3))
    predicted = Curve("predicted", over("predicted_s", 1e3), dashed=True)
    yield lines("Time of a step: predicted and measured", "step", "ms", [measured, predicted], at_step, zero=True)
    parts = ("compute_s", "comm_s", "wait_s", "data_s")
    where = [Curve(name, over(part, 1e3)) for name, part in zip(PARTS, parts, strict=True)]
    yield lines("Where a step's time goes, mean over ranks", "step", "ms", where, zero=True)
    rows = [(rank.place, [getattr(rank, part) for part in parts]) for rank in document.ranks]
    busiest = sorted(sorted(rows, key=lambda row: -row[1][0])[:BARS])
    of = f", the {BARS} of {len(rows)} with the most computing" if len(rows) > BARS else ""
    yield bars(f"Where each rank's time went{of}", "seconds", PARTS, busiest)
    yield _split_plot(document)
    sizes = [(attempt.unix_s - began, float(attempt.size)) for attempt in document.attempts]
    if sizes:
        sizes.append((max(document.updated_unix_s - began, sizes[-1][0]), sizes[-1][1]))
    yield lines("Ranks that train, and faults", "seconds since the start", "ranks", [Curve("ranks", sizes, steps=True)],
                at_time, zero=True)  # fmt: skip
    saved = [(entry.unix_s - began, entry.duration_s) for entry in document.checkpoints]
    yield lines("Writing a checkpoint, in the background", "seconds since the start", "s", [Curve("writing", saved)],
                zero=True)  # fmt: skip


def _split_plot(document: Document) -> str:
    """Return a plot of the ranks' local batch sizes over steps, as an HTML element.

    If there are more than ``LINES`` ranks, only those with the largest changes are shown.
    """
    splits = document.splits
    moved = {
        name: max(seen) - min(seen)
        for name in {name for split in splits for name in split.shares}
        if (seen := [split.shares.get(name, 0) for split in splits])
    }
    chosen = sorted(sorted(moved, key=lambda name: (-moved[name], name))[:LINES])
    curves = []
    for name in chosen:
        points = [(float(split.step), float(split.shares.get(name, 0))) for split in splits]
        points.append((float(max(document.step, points[-1][0])), points[-1][1]))
        curves.append(Curve(name, points, steps=True))
    of = f", the {LINES} of {len(moved)} ranks that changed most" if len(moved) > LINES else ""
    return lines(f"Local batch sizes{of}", "step", "samples", curves, zero=True)


def _tables(document: Document) -> Iterable[str]:
    if document.faults:
        rows = [
            (
                _date(fault.unix_s), number(fault.step), fault.failure.reason,
                "" if fault.failure.rank is None else f"{fault.failure.rank} on {fault.failure.host}",
                duration(fault.resumed_unix_s - fault.unix_s) if fault.resumed_unix_s is not None else "-",
                fault.failure.message,
            )
            for fault in document.faults
        ]  # fmt: skip
        yield "<h2>Faults</h2>" + table(("when", "step", "cause", "rank", "resumed after", "message"), rows)
        tail = next((f.failure.log_tail for f in reversed(document.faults) if f.failure.log_tail), "")
        if tail:
            yield f"<details><summary>Last log of a rank that failed</summary><pre>{clean(tail)}</pre></details>"
    plans = [
        (str(p.number), _date(p.unix_s), number(p.step), str(p.ranks), p.collective,
         "" if p.predicted_step_s is None else duration(p.predicted_step_s),
         "" if p.predicted_total_s is None else duration(p.predicted_total_s))
        for p in document.plans
    ]  # fmt: skip
    yield "<h2>Plans</h2>" + table(("plan", "when", "step", "ranks", "collective", "step", "training"), plans)
    if document.splits:
        kept = document.splits[-20:]
        shares = [(number(s.step), s.reason, ", ".join(f"{n} {v}" for n, v in s.shares.items())) for s in kept]
        yield f'<h2>Local batch sizes</h2><p class="soft">{document.totals.splits} changes; the last ones:</p>'
        yield table(("from step", "reason", "samples"), shares)
    names = ("step", "steps", "loss", "learning_rate", "gradient_norm", "step_s", "predicted_s", "samples_per_s",
             "compute_s", "comm_s", "wait_s", "data_s", "world_size", "noise_samples")  # fmt: skip
    values = [[_value(getattr(point, name)) for name in names] for point in document.points]
    yield f"<details><summary>Values of the series</summary>{table(names, values, 'series')}</details>"
    evaluations = [(str(entry.step), _value(entry.accuracy), _value(entry.loss)) for entry in document.evaluations]
    if evaluations:
        values_table = table(("step", "accuracy", "loss"), evaluations, "evaluations")
        yield f"<details><summary>Evaluations</summary>{values_table}</details>"


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """Return a duration as text, such as '3.2 ms', '12.1 s', '3 min 20 s' or '2 h 5 min'."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def size(nbytes: float) -> str:
    """Return a number of bytes as text, such as '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def joules(energy_J: float) -> str:
    """Return an energy as text, such as '950 J', '12.3 kJ' or '4.56 MJ'."""
    for unit in ("J", "kJ", "MJ"):
        if energy_J < 1000:
            return f"{energy_J:.3g} {unit}"
        energy_J /= 1000
    return f"{energy_J:.3g} GJ"
