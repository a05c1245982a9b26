"""Tables and the HTML page of ``taihulight.py``: measured beside predicted, and predicted beside published."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.papers.taihulight_ranks import COPIED, FORCED, OPEN_MPI, RING, SCATTERED, SERVER
from benchmarks.perfmodel.gradient_layouts import LAYOUTS
from benchmarks.perfmodel.literature import (
    DEFAULT_OVER_RING,
    FIGURE_7_NBYTES,
    NODES,
    PUBLISHED,
    Constants,
    default_over_ring,
    latency_only,
    search,
    times,
)

from dltrain.record.run_report import plots
from dltrain.record.run_report.page import html_page

Rows = list[dict[str, Any]]
Table = tuple[Sequence[str], list[list[str]]]
"""Names of the columns, and the rows."""
COMPARISONS = ((SERVER, RING), (OPEN_MPI, FORCED), (OPEN_MPI, RING), (SCATTERED, RING), (COPIED, RING))
MAX_FREE = 0.5
"""Largest time on unlimited links, relative to that on shaped ones, at which the links still take the time."""


def ratio(rows: Rows, model: str, ranks: int, over: str, under: str, field: str = "measured_s") -> float:
    """Return the ratio of two ways' seconds for one model and number of ranks."""
    by_way = {row["way"]: row[field] for row in rows if row["model"] == model and row["ranks"] == ranks}
    return float(by_way[over] / by_way[under])


def bottleneck(row: dict[str, Any]) -> str:
    """Return what takes the time of an exchange: ``links``, ``processors``, or ``-`` if it was not measured."""
    if row["free_s"] is None:
        return "-"
    return "links" if row["free_s"] <= MAX_FREE * row["measured_s"] else "processors"


def times_table(rows: Rows) -> Table:
    """Return measured and predicted seconds, with the processors' load and what takes the time."""
    head = ("model", "ranks", "way", "measured, s (range)", "predicted, s", "measured / predicted",
            "unlimited links, s", "processors: ranks, machine", "bottleneck")  # fmt: skip
    cells = [
        [
            row["model"], str(row["ranks"]), row["way"],
            f"{row['measured_s']:.3f} ({row['fastest_s']:.3f}-{row['slowest_s']:.3f})", f"{row['predicted_s']:.3f}",
            f"{row['measured_s'] / row['predicted_s']:.2f}",
            "-" if row["free_s"] is None else f"{row['free_s']:.3f}",
            f"{100 * row['ranks_load']:.0f} %, {100 * row['machine_load']:.0f} %", bottleneck(row),
        ]
        for row in rows
    ]  # fmt: skip
    return head, cells


def ratios_table(rows: Rows) -> Table:
    """Return the ratios of the paper's comparisons, and what takes the time of the two ways."""
    cells = []
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in rows):
        for over, under in COMPARISONS:
            both = [f"{ratio(rows, model, ranks, over, under, name):.2f}" for name in ("measured_s", "predicted_s")]
            own = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
            limits = " and ".join(sorted({bottleneck(row) for row in own if row["way"] in (over, under)}))
            cells.append([model, str(ranks), f"{over} / {under}", *both, limits])
    return ("model", "ranks", "comparison", "measured", "predicted", "bottleneck"), cells


def published_table() -> Table:
    """Return the published ratios beside those that the model predicts for the same number of nodes."""
    stated, best = Constants(), search("Serial")
    cells = []
    for figure, (model, at) in zip((9, 10, 11), PUBLISHED.items(), strict=True):
        sizes = LAYOUTS[model]
        predicted = (
            times(sizes, at.nodes, stated).ratio, latency_only(len(sizes), at.nodes),
            times(sizes, at.nodes, best).ratio, times(sizes, 512, stated).ratio,
        )  # fmt: skip
        cells.append([f"{figure}: {model}, {SERVER} / {RING}", str(at.nodes), f"{at.ratio:g}",
                      *(f"{value:.1f}" for value in predicted)])  # fmt: skip
    for nbytes in FIGURE_7_NBYTES:
        value = f"{default_over_ring(nbytes, stated):.1f}"
        cells.append([f"7, 8: MPI_Allreduce / {RING}, {nbytes / 1e6:.4g} MB", "512",
                      " to ".join(f"{bound:g}" for bound in DEFAULT_OVER_RING), value, "-", "-", value])  # fmt: skip
    predictions = ("14 GB/s, 1 us", "latency only", "best single set", "512 nodes, 14 GB/s, 1 us")
    head = ("figure", "nodes", "published", *predictions)
    return head, cells


def show(rows: Rows) -> None:
    """Print measured and predicted seconds, the ratios of the paper's comparisons, and the published ratios."""
    titles = ("Seconds of an exchange", "Ratios measured here", "Ratios published, and predicted for these nodes")
    for title, (head, cells) in zip(titles, (times_table(rows), ratios_table(rows), published_table()), strict=True):
        print(f"\n{title}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for line in cells:
            print(f"| {' | '.join(line)} |")
    print("\n" + "\n".join(remarks(rows)))


def remarks(rows: Rows) -> list[str]:
    """Return what a reader needs to judge the figures: latencies, load of the machine, and rows without a meaning."""
    found = [
        f"{ranks} ranks: the predictions use a measured latency of {1e6 * latency_s:.0f} us"
        for ranks, latency_s in dict.fromkeys((row["ranks"], row["latency_s"]) for row in rows)
    ]
    others = median(max(0.0, min(1.0, row["machine_load"]) - row["ranks_load"]) for row in rows)
    found.append(f"Other programs and the kernel's network used {100 * others:.0f} % of the processors (median)")
    if limited := sum(bottleneck(row) == "processors" for row in rows):
        found.append(
            f"In {limited} of {len(rows)} rows the processors take the time, not the links. Stop other programs, or "
            "choose a lower --rate, or a lower --scale for larger tensors"
        )
    return found


def page(rows: Rows, about: str) -> str:
    """Return an HTML page with plots like the paper's figures: measured here, and by the model on 2 to 512 nodes."""
    body = ["<h1>Layered parameter server against ring</h1>", f"<p>{plots.clean(about)}</p>"]
    for model in LAYOUTS:
        own = [row for row in rows if row["model"] == model]
        curves = [
            plots.Curve(
                f"{way}, {field.removesuffix('_s')}",
                [(row["ranks"], row[field]) for row in own if row["way"] == way],
                dashed=field == "predicted_s",
            )
            for way in (SERVER, RING, OPEN_MPI, FORCED)
            for field in ("measured_s", "predicted_s")
        ]
        body.append(plots.lines(f"{model}: measured here", "ranks", "s", curves, zero=True))
    counts = sorted({row["ranks"] for row in rows})
    for over, under in COMPARISONS:
        curves = [
            plots.Curve(
                f"{model}, {field.removesuffix('_s')}",
                [(float(n), ratio(rows, model, n, over, under, field)) for n in counts],
                dashed=field == "predicted_s",
            )
            for model in LAYOUTS
            for field in ("measured_s", "predicted_s")
        ]
        body.append(plots.lines(f"{over} / {under}, measured here", "ranks", "ratio", curves, zero=True))
    body += _by_the_model()
    for title, (head, cells) in (
        ("Published, and predicted for the same nodes", published_table()),
        ("Measured here: ratios", ratios_table(rows)),
        ("Measured here: seconds, and what takes the time", times_table(rows)),
    ):
        body += [f"<h2>{plots.clean(title)}</h2>", plots.table(head, cells)]
    body += [f"<p>{plots.clean(remark)}</p>" for remark in remarks(rows)]
    body.append("<p>Why the figures differ: docs/papers.md.</p>")
    return html_page("Layered parameter server against ring", body)


def _by_the_model() -> list[str]:
    """Return plots like figures 7 to 11 of the paper, by the model on 2 to 512 nodes."""
    stated = Constants()
    names = {"as stated (14 GB/s, 1 us)": stated, "best single set of constants": search("Serial")}
    low, high = DEFAULT_OVER_RING
    curves = [
        plots.Curve(
            f"{nbytes / 1e6:.4g} MB", [(float(k), default_over_ring(nbytes, stated, n)) for k, n in enumerate(NODES, 1)]
        )
        for nbytes in FIGURE_7_NBYTES
    ]
    mark = plots.Mark(9.0, f"published on 512 nodes: {low} to {high}")
    text = f"Figures 7, 8: MPI_Allreduce / ring on 2^k nodes by the model; published {low} to {high} on 512 nodes"
    found = [plots.lines(text, "k", "ratio", curves, [mark], zero=True)]
    for figure, (model, at) in zip((9, 10, 11), PUBLISHED.items(), strict=True):
        curves = [
            plots.Curve(name, [(float(k), times(LAYOUTS[model], n, given).ratio) for k, n in enumerate(NODES, 1)])
            for name, given in names.items()
        ]
        text = f"Figure {figure}: {model}, server / ring on 2^k nodes; published {at.ratio:g} on {at.nodes} nodes"
        mark = plots.Mark(float(at.nodes.bit_length() - 1), f"published: {at.ratio:g}")
        found.append(plots.lines(text, "k", "ratio", curves, [mark], zero=True))
    return found
