"""The sections of the page about the predictions for held-out data, and about what the run's curves show."""

from collections.abc import Iterable

from dltrain.analysis.result import Analysis, Calibration, Classification, Regression, WrongExample
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.learning_curves import MIN_POINTS
from dltrain.record.run_report.plots import clean, matrix, number, points, table

TITLES = {
    "InvalidPredictions": "Invalid predictions",
    "ConstantLoss": "The loss does not change",
    "NotLearning": "The model does not learn",
    "LearningRateTooHigh": "The learning rate may be too high",
    "NoBetterThanBaseline": "No better than the baseline",
    "WorseThanOtherModel": "Another model is better",
    "Overfitting": "The model over-fits",
    "NotConverged": "The training ended too early",
    "MissedClass": "A class is never recognized",
    "NoisyLoss": "The loss is noisy",
    "Overconfident": "The model is overconfident",
    "Underconfident": "The model is underconfident",
}

METRICS = {"R2": "R²"}


def findings(document: Document) -> Iterable[str]:
    """Yield an HTML list of the findings about the curves and the predictions."""
    if document.findings:
        items = [f"<li><b>{TITLES[each.name]}.</b> {clean(each.message)}.</li>" for each in document.findings]
    elif sum(point.loss is not None for point in document.points) >= MIN_POINTS:
        items = ['<li class="good">The curves show no problem.</li>']
    else:
        return
    yield f'<ul class="findings" id="findings">{"".join(items)}</ul>'


def held_out(document: Document) -> Iterable[str]:
    """Yield the HTML section about the predictions for held-out data, if there is an analysis of them."""
    if document.analysis is None:
        return
    analysis = document.analysis.analysis
    unit = "tokens" if analysis.language is not None else "samples"
    text = f"{number(analysis.samples)} {unit}, after step {number(document.analysis.step)}"
    if analysis.invalid:
        text += f"; {number(analysis.invalid)} predictions that are NaN or infinite are left out"
    yield f'<h2>Held-out data</h2><p class="soft">{text}</p>'
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _tiles(analysis))
    yield f"<dl>{tiles}</dl>"
    plots = [_compared(analysis)] if analysis.other_models else []
    plots += _plots(analysis)
    if analysis.classification is not None:
        plots.append(_classes(analysis.classification))
    figures = analysis.classification or analysis.regression
    if figures is not None and figures.wrong:
        plots.append(_wrong(figures.wrong, classes=analysis.classification is not None))
    yield f'<div class="plots">{"".join(plots)}</div>'


def _tiles(analysis: Analysis) -> Iterable[tuple[str, str]]:
    if (classes := analysis.classification) is not None:
        yield "accuracy", _percent(classes.accuracy)
        yield "always the most frequent class", _percent(classes.baseline_accuracy)
        yield "mean recall of the classes", _percent(classes.balanced_accuracy)
        yield "mean F1 of the classes", f"{classes.macro_f1:.4g}"
        if classes.log_loss is not None:
            yield "loss (log-likelihood)", f"{classes.log_loss:.4g}"
    if (numbers := analysis.regression) is not None:
        yield "R²", "undefined: equal targets" if numbers.r2 is None else f"{numbers.r2:.4g}"
        yield "RMSE", f"{numbers.rmse:.4g}"
        yield "RMSE of the mean target", f"{numbers.baseline_rmse:.4g}"
        yield "mean absolute error", f"{numbers.mae:.4g}"
        yield "bias", f"{numbers.bias:+.3g}"
    if (language := analysis.language) is not None:
        yield "perplexity", f"{language.perplexity:.4g}"
        yield "perplexity of guessing", number(language.vocabulary)
        yield "bits per token", f"{language.bits_per_token:.4g}"
        yield "accuracy of the next token", _percent(language.accuracy)
    if analysis.calibration is not None:
        yield "calibration error", f"{analysis.calibration.error:.3g}"


def _compared(analysis: Analysis) -> str:
    """Return an HTML table of the main metric on the held-out data, the best first.

    Its rows: this model, other models such as a linear model and trees, and a baseline that ignores the inputs.
    """
    (metric, value), baseline = analysis.metric, analysis.baseline
    rows = [("this model", value), *((each.name, each.value) for each in analysis.other_models)]
    if baseline is not None:
        rows.append(("without inputs", baseline))
    rows.sort(key=lambda row: row[1], reverse=analysis.language is None)
    show = _percent if analysis.classification is not None else lambda each: f"{each:.4g}"
    title = "Models on the same held-out data, the best one first"
    return _captioned(title, table(("model", METRICS.get(metric, metric)), [(n, show(v)) for n, v in rows], "compared"))


def _plots(analysis: Analysis) -> Iterable[str]:
    if (classes := analysis.classification) is not None and classes.figures:
        of = f", the {len(classes.figures)} with the most errors" if len(classes.figures) < classes.classes else ""
        yield matrix(f"Confusion matrix: targets (rows) and predictions{of}", classes.names, classes.confusion)
    if analysis.calibration is not None:
        yield _reliability(analysis.calibration)
    if (numbers := analysis.regression) is not None:
        pairs = [(x, y, f"target {number(x)}: predicted {number(y)}") for x, y in numbers.points]
        of = f", {len(pairs)} random samples" if len(pairs) < analysis.samples else ""
        yield points(f"Predictions and targets{of}", "target", "prediction", pairs)
        yield _residuals(numbers)


def _reliability(calibration: Calibration) -> str:
    pairs = [
        (each.confidence, each.accuracy, f"confidence {each.confidence:.3g}: accuracy {each.accuracy:.3g}, "
         f"{each.samples} predictions")
        for each in calibration.bins
    ]  # fmt: skip
    total = sum(each.samples for each in calibration.bins)
    weights = [each.samples / total for each in calibration.bins]
    title = "Calibration: accuracy by confidence, larger for more samples. On the dashed line, both agree"
    return points(
        title, "confidence (probability of the predicted class)", "accuracy", pairs, extent=(0, 1), weights=weights
    )


def _residuals(numbers: Regression) -> str:
    rows = [(f"{100 * probability:g} %", f"{residual:.4g}") for probability, residual in numbers.quantiles]
    head = ("part of the samples", "residual (prediction - target) at most")
    return _captioned("Quantiles of the residuals", table(head, rows, "residuals"))


def _classes(classes: Classification) -> str:
    head = ("class", "samples", "predicted", "correct", "precision", "recall", "F1")
    rows = [
        (each.name, number(each.support), number(each.predicted), number(each.correct), _ratio(each.precision),
         _ratio(each.recall), _ratio(each.f1))
        for each in classes.figures
    ]  # fmt: skip
    return _captioned("Classes", table(head, rows, "classes"))


def _wrong(wrong: Iterable[WrongExample], *, classes: bool) -> str:
    head = ("sample", "target", "prediction", *(("probability",) if classes else ()))
    rows = [
        (str(each.index), each.target, each.prediction, *((_ratio(each.probability),) if classes else ()))
        for each in wrong
    ]
    title = "Most-wrong samples: errors with the highest probability" if classes else "Largest residuals"
    return _captioned(title, table(head, rows, "wrong"))


def _captioned(title: str, element: str) -> str:
    return f"<figure><figcaption>{title}</figcaption>{element}</figure>"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
