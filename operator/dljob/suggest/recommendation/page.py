"""Write the page that ``dljob suggest`` prints: what the data holds, what is recommended, and why."""

from collections import Counter
from collections.abc import Sequence

from dljob.suggest.inspection.images import ImageFacts
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.recommendation.accuracy import accuracy_class
from dljob.suggest.recommendation.limit import NO_LIMIT, race_s, total_s
from dljob.suggest.recommendation.model import Baseline, Settings
from dljob.suggest.recommendation.prediction import Prediction

Facts = TableFacts | ImageFacts | TextFacts
MEASURES = {
    "r2": "R²",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "bits_per_byte": "bits per byte",
}

PERFECT = 0.999
"""A baseline with this score is more often a leak than a good model."""


def page(
    facts: Facts,
    models: Sequence[tuple[Settings, Prediction]],
    baseline: Baseline | None,
    race: str = NO_LIMIT,
) -> list[str]:
    """Return the lines that ``dljob suggest`` prints. ``models``: the recommended model, then the alternatives.

    ``race``: the line of ``with_race``.
    """
    chosen = models[0][0]
    lines = ["Data", *data_lines(facts), "", "Findings"]
    lines += [f"  - {text}" for text in facts.findings or ("Nothing unusual.",)]
    lines += ["", "Baseline without deep learning", *_baseline(facts, baseline), ""]
    lines += [
        "Recommendation",
        f"  model          {chosen.name}, because {chosen.why}",
        f"  loss           {chosen.loss}" + (", weighted by class" if chosen.class_weights else ""),
        f"  batch          {chosen.batch} (from {chosen.batch_range[0]} to {chosen.batch_range[1]})",
        f"  epochs         {chosen.epochs}",
        f"  learning rate  up to {chosen.learning_rate:g}, one cycle of warm-up and decay (Adam)",
        f"  augmentation   {chosen.augmentation}",
        f"  race           {race}",
        "",
        "Predicted by the planner (data sheets; a first run replaces them by measurements)",
    ]
    rows = [("model", "parameters", "accuracy", "time", "memory", "energy", "cost", "plan")]
    for settings, found in models:
        accuracy = accuracy_class(settings, facts, baseline)
        if found.problem:
            rows.append((settings.name, f"{settings.parameters:,}", accuracy, "no plan", "", "", "", found.problem))
            continue
        rows.append(
            (
                settings.name,
                f"{settings.parameters:,}",
                accuracy,
                _seconds(found.time_s),
                f"{found.memory_nbytes / 2**20:,.0f} MiB",
                "unknown" if found.energy_J is None else f"{found.energy_J:,.0f} J",
                "unknown" if found.cost_usd is None else f"{found.cost_usd:.4f} $",
                found.summary,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    lines += ["  " + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines


def data_lines(facts: Facts) -> list[str]:
    if isinstance(facts, TextFacts):
        return _text(facts)
    if isinstance(facts, ImageFacts):
        size = f"{facts.size[0]}×{facts.size[1]}, {'grey' if facts.channels == 1 else 'colours'}"
        test = f", and {facts.test_images:,} of a test part" if facts.test_images else ""
        return [f"  {facts.images:,} images{test}: {size}", f"  {_classes(facts.classes)}"]
    kinds = Counter(column.kind.value for column in facts.columns)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    test = f", and {facts.test_rows:,} of a test part" if facts.test_rows else ""
    goal = _classes(facts.classes) if facts.classes else "numbers"
    return [
        f"  {facts.rows:,} rows{test}; {len(facts.columns)} columns that the model reads ({shown})",
        f"  target {facts.target!r}: {facts.task}, {goal}",
    ]


def _text(facts: TextFacts) -> list[str]:
    test = f", and {facts.test_documents:,} of a test part" if facts.test_documents else ""
    scripts = ", ".join(f"{name.lower()} {part:.0%}" for name, part in facts.scripts.items() if part >= 0.005)
    return [
        f"  {facts.documents:,} documents{test}; {facts.nbytes:,} bytes",
        f"  {facts.words:,} words, {facts.vocabulary:,} different; a document has {facts.median_words:,} (median), "
        f"95 % have at most {facts.long_words:,}",
        f"  letters: {scripts or 'none'}",
        f"  {_classes(facts.classes)}" if facts.classes else "  no classes: the model learns to predict the next byte",
    ]


def _classes(classes: dict[str, int], most: int = 5) -> str:
    shown = ", ".join(f"{name!r:.30} ({count:,})" for name, count in list(classes.items())[:most])
    return f"{len(classes)} classes: {shown}{', …' if len(classes) > most else ''}"


def _baseline(facts: Facts, baseline: Baseline | None) -> list[str]:
    if baseline is None:
        return ["  not run"]
    name = MEASURES[baseline.scoring]
    lines = [
        f"  {label:14} {name} {score.validation:.3f} ± {score.error:.3f} on held-out folds of the training part, "
        f"{score.test:.3f} on the test part"
        for label, score in baseline.scores.items()
    ]
    if baseline.scoring != "bits_per_byte" and any(s.validation >= PERFECT for s in baseline.scores.values()):
        lines.append(
            "  Such a score is rare. Check that nothing in the data is known only after the target (a leak), and that "
            "rows of one person or device are not in both parts."
        )
    if isinstance(facts, TextFacts) and not facts.classes:
        return [*lines, "  Less is better. A language model that does not beat pairs of bytes has learned nothing."]
    if not isinstance(facts, TableFacts):
        return lines
    if baseline.trees_win:
        lines.append(
            "  Trees will probably do as well as a network on this table, or better, and need no cluster: "
            "compare python baseline.py with python train.py before you train anything larger."
        )
    else:
        lines.append("  Trees add nothing here. A linear model is enough, and the recommended model is one.")
    return lines


def limit_lines(
    limit_s: float,
    left_s: float,
    chosen: tuple[Settings, Prediction],
    whole: Sequence[Settings],
    reading_s: float,
    pace: float | None,
) -> list[str]:
    """Return the lines about the time limit ``limit_s`` of the command and the training together.

    ``left_s``: seconds left for the training's script. ``chosen``: the recommended model within the limit. ``whole``:
    the models without a limit. ``reading_s``: seconds to read the data. ``pace``: measured seconds for each predicted
    one; None: not measured.
    """
    settings = chosen[0]
    recommended = next(other for other in whole if other.name == settings.name)
    race = race_s(chosen, pace or 1.0) if settings.race else 0.0
    total = total_s(chosen, reading_s, pace or 1.0) + race
    lines = [
        "",
        f"Time limit of {_seconds(limit_s)}",
        f"  used by this command   {_seconds(limit_s - left_s)}: reading, baseline"
        + (" and a short training that measured the pace" if pace else ""),
        f"  predicted for train.py {_seconds(total)}: start, reading, "
        + (f"the race ({_seconds(race)}), " if race else "")
        + f"{settings.epochs} epochs, evaluation"
        + (f" (steps took {pace:.1f} times the planner's time)" if pace else " (not measured on this machine)"),
        f"  left for train.py      {_seconds(left_s)}; it ends its training in time to evaluate within that",
    ]
    if settings.epochs < recommended.epochs:
        lines.append(f"  The limit cuts the epochs from {recommended.epochs} to {settings.epochs}.")
    if settings.name != whole[0].name:
        lines.append(f"  The limit is too short for the recommended {whole[0].name}.")
    if total > left_s:
        lines.append("  One epoch may not fit. The script then ends within its first epoch.")
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"
