"""Plots as SVG elements: lines over steps or time, stacked bars, matrices and points; and tables.

The page's style sheet defines the colours (CSS classes ``c0`` to ``c7``) for light and dark mode.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
COLOURS = 8


@dataclass(frozen=True)
class Curve:
    """A curve of a line plot. ``points``: (x, y) in ascending order of x.

    ``steps``: True to draw a step function, in which y changes only at a point. ``dashed``: True to draw a dashed line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Mark:
    """An event that a plot shows as a vertical line. ``x``: position on the x axis. ``text``: the line's tooltip."""

    x: float
    text: str


def clean(text: str) -> str:
    """Escape ``text`` for HTML and XML, and remove control characters, which XML does not allow."""
    return escape("".join(c for c in text if c in "\n\t" or c.isprintable() or c == "\N{NO-BREAK SPACE}"))


def number(value: float) -> str:
    """Format a number for people: an integer with thin spaces between thousands, another number with 4 digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Return about ``count`` evenly spaced round numbers from ``low`` to ``high``, as labels of an axis.

    ``whole``: True for an axis of whole numbers, such as steps.
    """
    if high <= low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= 0.7 * rough)
    step = max(1.0, step) if whole else step
    first = -floor(-low / step + 1e-9)
    found, index = list[float](), first
    while index * step <= high + 1e-9 * step:
        found.append(round(index * step, 12))
        index += 1
    return found


SMALLEST = 1e-300
"""A tenth of a smaller number may be 0."""


def _extent(low: float, high: float, margin: float) -> tuple[float, float]:
    """Return the (lower, upper) end of an axis for values from ``low`` to ``high``. The ends always differ.

    ``margin``: space at each end, as a fraction of ``high - low``. A ``low`` of 0 gets no margin.
    """
    length = high - low
    if length <= 1e-9 * max(abs(low), abs(high), 1e-30):
        length = abs(high)
        return (low - length / 10, high + length / 10) if length > SMALLEST else (0.0, 1.0)
    return low - margin * length if low else 0.0, high + margin * length


def lines(
    title: str, x_label: str, y_label: str, curves: Sequence[Curve], marks: Sequence[Mark] = (), *, zero: bool = False
) -> str:
    """Return a line plot as an HTML element, or an empty string if no curve has a point.

    ``marks``: events to show. ``zero``: True if the y axis must include 0.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x0, x1 = _extent(min(xs), max(xs), 0.0)
    y0, y1 = _extent(min(0.0, *ys) if zero else min(ys), max(ys), 0.05)

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / (x1 - x0)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y0) / (y1 - y0)

    whole = all(float(x).is_integer() for curve in curves for x, _ in curve.points)
    at = [(at_x(x), x) for x in ticks(x0, x1, whole=whole)]
    parts = [_frame(title, at, [(at_y(y), y) for y in ticks(y0, y1)], x_label, y_label)]
    for mark in marks:
        if x0 <= mark.x <= x1:
            parts.append(
                f'<line class="mark" x1="{at_x(mark.x):.1f}" x2="{at_x(mark.x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{clean(mark.text)}</title></line>"
            )
    for index, curve in enumerate(curves):
        dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
        colour = f"c{index % COLOURS}"
        points = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in _held(curve))
        parts.append(
            f'<polyline class="line {colour}" points="{points}"{dashes}><title>{clean(curve.name)}</title></polyline>'
        )
        if len(curve.points) <= 40 and not curve.steps and not curve.dashed:
            parts += [
                f'<circle class="dot {colour}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.5">'
                f"<title>{number(x)}: {number(y)}</title></circle>"
                for x, y in curve.points
            ]
    return _figure(title, "".join(parts), HEIGHT, [curve.name for curve in curves])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Return an HTML table. ``head``: names of the columns. ``name``: its id, for tools that read the page.

    ``rows``: the texts of the cells.
    """
    identity = f' id="{name}"' if name else ""
    top = "".join(f"<th>{clean(cell)}</th>" for cell in head)
    cells = "".join("<tr>" + "".join(f"<td>{clean(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table{identity}><thead><tr>{top}</tr></thead><tbody>{cells}</tbody></table></div>'


def bars(title: str, x_label: str, parts: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return a plot with one stacked bar per row as an HTML element.

    Return an empty string if there are no rows or all values are 0. ``rows``: pairs of a label and the lengths of the
    bar's parts. ``parts``: the names of these parts, for the legend.
    """
    longest = max((sum(values) for _, values in rows), default=0.0)
    if not longest:
        return ""
    height, left = 24 * len(rows) + 44, 150
    scale = (WIDTH - left - RIGHT) / longest
    drawn = []
    for row, (label, values) in enumerate(rows):
        y, x = 24 * row + 4, float(left)
        drawn.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{clean(label[-24:])}</text>')
        for index, value in enumerate(values):
            drawn.append(
                f'<rect class="bar c{index % COLOURS}" x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="18">'
                f"<title>{clean(label)}, {clean(parts[index])}: {number(value)}</title></rect>"
            )
            x += value * scale
    for value in ticks(0, longest):
        drawn.append(
            f'<text x="{left + value * scale:.1f}" y="{height - 24}" text-anchor="middle">{number(value)}</text>'
        )
    drawn.append(f'<text x="{(left + WIDTH) / 2:.0f}" y="{height - 6}" text-anchor="middle">{clean(x_label)}</text>')
    return _figure(title, "".join(drawn), height, parts)


def matrix(title: str, names: Sequence[str], rows: Sequence[Sequence[int]]) -> str:
    """Return a confusion matrix as an HTML element. ``rows``: counts by target, then by prediction.

    The darker a cell, the larger its part of the row. Cells of errors have another colour than those on the diagonal.
    ``names``: names of the classes.
    """
    size, left, top = min(44.0, (WIDTH - 120) / max(1, len(names))), 110, 24
    width = left + size * len(names)
    drawn = [f'<text x="{left + size * len(names) / 2:.0f}" y="12" text-anchor="middle">predicted</text>']
    for row, counts in enumerate(rows):
        y, total = top + size * row, sum(counts) or 1
        label = clean(_short(names[row]))
        drawn.append(f'<text x="{left - 6}" y="{y + size / 2 + 4:.1f}" text-anchor="end">{label}</text>')
        for column, count in enumerate(counts):
            x = left + size * column
            part = count / total
            shade = 0.05 + 0.6 * part if row == column else 0.1 + 0.6 * part**0.5  # Few errors must be visible, too.
            off = "" if row == column else " off"
            drawn.append(
                f'<rect class="cell{off}" x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{size - 1:.1f}" '
                f'height="{size - 1:.1f}" fill-opacity="{shade if count else 0.02:.2f}"><title>'
                f"{clean(names[row])} as {clean(names[column])}: {count}, {100 * part:.3g} %</title></rect>"
            )
            if count:
                drawn.append(
                    f'<text class="on" x="{x + size / 2:.1f}" y="{y + size / 2 + 4:.1f}" text-anchor="middle">'
                    f"{count if count < 10_000 else f'{count:.0e}'}</text>"
                )
    bottom = top + size * len(names)
    for column, name in enumerate(names):
        x = left + size * (column + 0.5)
        if all(len(each) * 6 < size for each in names):
            drawn.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{clean(name)}</text>')
        else:
            at = f'transform="translate({x + 4:.1f} {bottom + 8:.1f}) rotate(-45)"'
            drawn.append(f'<text {at} text-anchor="end">{clean(_short(name))}</text>')
    short = all(len(each) * 6 < size for each in names)
    return _figure(title, "".join(drawn), round(bottom + (20 if short else 72)), [], width=max(440, round(width + 4)))


def _short(name: str) -> str:
    """Return at most 14 characters of a name. Names of classes often differ at their ends only."""
    return name if len(name) <= 14 else f"{name[:7]}…{name[-6:]}"


def points(
    title: str,
    x_label: str,
    y_label: str,
    pairs: Sequence[tuple[float, float, str]],
    *,
    extent: tuple[float, float] | None = None,
    weights: Sequence[float] = (),
) -> str:
    """Return points (x, y, tooltip) beside the line y = x as an HTML element; an empty string without points.

    ``extent``: ends of both axes; default: those of the values. ``weights``: from 0 to 1, for each point; the points
    are then joined by lines, and a point with a larger weight is larger.
    """
    if not pairs:
        return ""
    values = [value for x, y, _ in pairs for value in (x, y)]
    low, high = extent or _extent(min(values), max(values), 0.03)

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / (high - low)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    marks, radii = ticks(low, high), [2 + 5 * weight**0.5 for weight in weights] or [3.0] * len(pairs)
    drawn = [
        _frame(title, [(at_x(x), x) for x in marks], [(at_y(y), y) for y in marks], x_label, y_label),
        f'<line class="even" x1="{at_x(low):.1f}" y1="{at_y(low):.1f}" x2="{at_x(high):.1f}" y2="{at_y(high):.1f}"/>',
    ]
    if weights:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y, _ in pairs)
        drawn.append(f'<polyline class="line c0" points="{path}"/>')
    drawn += [
        f'<circle class="dot c0" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{radius:.1f}">'
        f"<title>{clean(text)}</title></circle>"
        for (x, y, text), radius in zip(pairs, radii, strict=True)
    ]
    return _figure(title, "".join(drawn), HEIGHT, [])


def _held(curve: Curve) -> list[tuple[float, float]]:
    if not curve.steps:
        return list(curve.points)
    held = [curve.points[0]]
    for x, y in curve.points[1:]:
        held += [(x, held[-1][1]), (x, y)]
    return held


def _frame(
    title: str, xs: Sequence[tuple[float, float]], ys: Sequence[tuple[float, float]], x_label: str, y_label: str
) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for at, value in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for at, value in xs:
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{clean(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{clean(y_label)}</text>'
    )
    return "".join(parts)


def _figure(title: str, drawn: str, height: int, names: Sequence[str], width: int = WIDTH) -> str:
    keys = "".join(f'<span><i class="key c{i % COLOURS}"></i>{clean(name)}</span>' for i, name in enumerate(names))
    legend = f'<div class="legend">{keys}</div>' if len(names) > 1 else ""
    return (
        f"<figure><figcaption>{clean(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{clean(title)}">{drawn}</svg>{legend}</figure>'
    )
