"""The short form of a run's analysis and findings, for the job's report to the operator."""

from dlcontract import MAX_FINDINGS, MAX_WORST_CLASSES, AnalysisSummary, ClassScore, ModelScore, Outcome, RunFinding
from dltrain.analysis.result import Analysis
from dltrain.record.run_report.document import Document

MAX_MESSAGE = 512


def with_summary(outcome: Outcome, document: Document) -> Outcome:
    """Return ``outcome`` with the short form of the analysis and the findings of ``document``."""
    analysis = document.analysis.analysis if document.analysis is not None else None
    findings = tuple(
        RunFinding(name=each.name, message=each.message[:MAX_MESSAGE]) for each in document.findings[:MAX_FINDINGS]
    )
    return outcome.model_copy(
        update={"analysis": None if analysis is None else summary(analysis), "findings": findings}
    )


def summary(analysis: Analysis) -> AnalysisSummary:
    """Return the short form of an analysis."""
    metric, value = analysis.metric
    calibration = analysis.calibration
    figures = analysis.classification.figures if analysis.classification is not None else ()
    rated = [(each.f1, each.name, each.support) for each in figures if each.f1 is not None and each.support]
    return AnalysisSummary(
        task=analysis.task,
        samples=analysis.samples,
        metric=metric,
        value=value,
        baseline=analysis.baseline,
        calibration_error=None if calibration is None else min(1.0, calibration.error),
        worst_classes=tuple(
            ClassScore(name=name, f1=f1, samples=samples)
            for f1, name, samples in sorted(rated)[:MAX_WORST_CLASSES]
            if f1 < 1
        ),
        other_models=tuple(ModelScore(name=each.name, value=each.value) for each in analysis.other_models),
    )
