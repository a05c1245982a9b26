"""All metrics of the operator. Every label has few possible values.

A job's name is never a label, because its time series would still exist after the job is deleted.
"""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from dlcontract.reasons import PARAMETERS_DIVERGED
from dljob.api import ConditionStatus, DLJobStatus, Phase, Usage
from dljob.api.changes import CHANGE_REFUSED, JOB_ENDED
from dljob.controller.job_counts import NamespaceForecast
from dljob.faults import EVERY_NAMESPACE, FaultKind, LeftOut
from dljob.scheduling import Interval
from dljob.status import find, is_true

CONTENT_TYPE = CONTENT_TYPE_LATEST
PHASES = tuple(phase.value for phase in Phase)
_RESIZES = ("BetterPlan", "DeadlineAtRisk", "DevicesReassigned", "NodesGone")
_RESULTS = ("ok", "rejected", "error")


def _steps_repeated(status: DLJobStatus) -> int:
    return (status.progress.steps_repeated or 0) if status.progress is not None else 0


def _diverged(status: DLJobStatus) -> int:
    """Return how often a job stopped because its ranks had different model parameters, which is an error.

    This is the number of restarts with this cause, plus 1 if the job failed with this reason.
    """
    failed = find(status.conditions, "Failed")
    last = failed is not None and is_true(status.conditions, "Failed") and failed.reason == PARAMETERS_DIVERGED
    return status.restarts_by_cause.get(PARAMETERS_DIVERGED, 0) + int(last)


def _refused(status: DLJobStatus) -> str | None:
    """Return the message if the operator refuses a change of the job's spec; otherwise None."""
    accepted = find(status.conditions, "Accepted")
    return accepted.message if accepted is not None and accepted.reason in (CHANGE_REFUSED, JOB_ENDED) else None


def _resized(before: DLJobStatus, after: DLJobStatus) -> str | None:
    """Return why a running job moved to another plan between two statuses, such as BetterPlan.

    Return None if it did not finish such a move between them, or for a reason that has no metric.
    """
    was, now = (find(status.conditions, "Resizing") for status in (before, after))
    moved = was is not None and is_true(before.conditions, "Resizing") and now is not None and now.reason == "Resized"
    return was.reason if moved and was is not None and was.reason in _RESIZES else None


class Metrics:
    """The operator's Prometheus metrics. Each instance has its own registry, so that tests do not share metrics."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # Avoids one extra series per metric.
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        prefix = "dljob_operator"

        def used(name: str, text: str) -> Counter:
            # Prometheus itself adds a label namespace: that of the operator's pod.
            return Counter(f"{prefix}_used_{name}", f"{text}, by namespace.", ["job_namespace"], registry=registry)

        self.reconcile_s = Histogram(
            f"{prefix}_reconcile_duration_seconds",
            "Duration of one reconcile. If the 99th percentile exceeds 1 s, check the API server's latency.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.reconciles = Counter(
            f"{prefix}_reconciles",
            "Reconciles by result: ok; rejected (the API server rejected an object: see the job's events); error "
            "(see the operator's log).",
            ["result"],
            registry=registry,
        )
        self.queue_depth = Gauge(
            f"{prefix}_queue_depth",
            "Jobs that wait for a worker of the operator. If it does not return to 0, raise operator.concurrency.",
            registry=registry,
        )
        self.jobs = Gauge(
            f"{prefix}_jobs", "Jobs by phase. Check jobs that stay Pending or Recovering.", ["phase"],
            registry=registry,
        )  # fmt: skip
        self.leader = Gauge(
            f"{prefix}_leader",
            "1 on the replica that is the leader. The sum over replicas must be 1.",
            registry=registry,
        )
        self.plans = Counter(
            f"{prefix}_plans",
            "Plans by result: accepted, or infeasible (no plan is possible: see the job's condition Planned).",
            ["result"],
            registry=registry,
        )
        self.planning_s = Histogram(
            f"{prefix}_planning_duration_seconds",
            "Time to make one plan. Jobs are planned one after another: if the 99th percentile exceeds 1 s, give the "
            "operator more CPU.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.planner_failures = Counter(
            f"{prefix}_planner_failures",
            "How often the process that makes plans crashed, or was stopped because a plan took too long. See the "
            "operator's log, and check whether the operator's memory limit is too low.",
            registry=registry,
        )
        self.reserved_pods = Gauge(
            f"{prefix}_reserved_pods",
            "Pods of accepted plans that are not placed yet, for which the operator reserves capacity. If it stays "
            "above 0, look for jobs with the condition PodsReady False.",
            registry=registry,
        )
        self.waiting_jobs = Gauge(
            f"{prefix}_waiting_jobs",
            "Jobs that wait for devices, by reason: no_plan (no plan is possible on the free devices), or queued "
            "(these jobs would delay the first job in the queue). If it does not fall, add nodes. The condition "
            "Planned of these jobs has details.",
            ["reason"],
            registry=registry,
        )
        self.queue_start_s = Gauge(
            f"{prefix}_queue_start_seconds",
            "Forecast: seconds until the first and the last waiting job start, at the median and at the 90th "
            "percentile of all run times. 0 without waiting jobs. If the last job starts too late, add nodes.",
            ["position", "percentile"],
            registry=registry,
        )
        self.without_forecast = Gauge(
            f"{prefix}_queue_jobs_without_forecast",
            "Waiting jobs without a forecast of their start. If it stays above 0, the remaining time of a running job "
            "is unknown, or the cluster is too small for these jobs: see their condition Planned.",
            registry=registry,
        )
        self.device_seconds = used(
            "device_seconds", "GPUs and CPUs that jobs had, times the seconds for which they had them"
        )
        self.energy_J = used(
            "energy_joules",
            "Energy that jobs used, with hosts and the data centre's overhead: measured where counters are readable, "
            "otherwise predicted",
        )
        self.cost_usd = used(
            "cost_dollars", "US dollars that jobs cost, by the prices of the catalogue or of the administrator"
        )
        self.carbon_g = used("carbon_grams", "Grams of CO2 equivalent of the energy of jobs that count carbon")
        self.deadlines = Gauge(
            f"{prefix}_deadlines",
            "Jobs with spec.scheduling.finishBy that have not ended, by status of their condition DeadlineFeasible. "
            "If False is not 0, see docs/how-to/troubleshooting.md.",
            ["feasible"],
            registry=registry,
        )
        self.deadline_slack_s = Gauge(
            f"{prefix}_deadline_slack_seconds",
            "Least slack of all jobs that train with a deadline: seconds from the predicted end (90th percentile) to "
            "the deadline. NaN without such a job. If it is negative, see the condition DeadlineAtRisk of the jobs.",
            registry=registry,
        )
        self.deadlines_at_risk = Gauge(
            f"{prefix}_deadlines_at_risk",
            "Jobs that train and will probably miss their deadline. If it is not 0, see the condition DeadlineAtRisk "
            "of the jobs.",
            registry=registry,
        )
        self.remaining_device_s = Gauge(
            f"{prefix}_forecast_remaining_device_seconds",
            "Predicted remaining training time of the jobs that hold devices, times their devices, by namespace and "
            "percentile (p10, p50, p90). status.forecast has the forecast of each job.",
            ["job_namespace", "percentile"],
            registry=registry,
        )
        self.stop_device_s = Gauge(
            f"{prefix}_forecast_stop_device_seconds",
            "Time that the jobs that hold devices would lose if all were killed now, times their devices, by "
            "namespace: training since the last checkpoint, and a restart. status.forecast has the figures of each "
            "job.",
            ["job_namespace"],
            registry=registry,
        )
        self.plan_error = Histogram(
            f"{prefix}_plan_step_error_ratio",
            "(predicted - measured) / measured step time of finished jobs. If it is far from 0, see the docs on "
            "calibration.",
            buckets=(-0.9, -0.5, -0.3, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5),
            registry=registry,
        )
        self.finished = Counter(
            f"{prefix}_jobs_finished", "Finished jobs by outcome: Complete or Failed.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.recoveries = Counter(
            f"{prefix}_recoveries",
            "Restarts of ranks, over all jobs. If it rises without evictions or lost nodes, check the training "
            "scripts for failures.",
            registry=registry,
        )
        self.steps_repeated = Counter(
            f"{prefix}_steps_repeated",
            "Steps that jobs did twice, because a restart resumed from an earlier step. If it rises, pods end without "
            "a last checkpoint: see status.progress.stepsRepeated and status.restartsByCause of the jobs.",
            registry=registry,
        )
        self.diverged = Counter(
            f"{prefix}_parameters_diverged",
            "How often the ranks of a job had different parameters, whether the job continued or failed. If it is not "
            "0, suspect the hardware; status.restartsByCause and the condition Failed show the job.",
            registry=registry,
        )
        self.changes_refused = Counter(
            f"{prefix}_changes_refused",
            "Changes of the spec of a running or ended job that the operator refused. The API server refuses nearly "
            "all of them itself; if this rises, its CRDs are older than the operator: upgrade them.",
            registry=registry,
        )
        self.resizes = Counter(
            f"{prefix}_resizes",
            "Running jobs that moved to another plan, by reason: BetterPlan (it ends sooner, or with less energy or "
            "cost), DeadlineAtRisk (the former plan missed the deadline), DevicesReassigned (other jobs gain more from "
            "what it releases, with queue.assignment: Together) or NodesGone. If jobs move often, nodes or jobs come "
            "and go; planning.resize: Never lets a job keep its plan.",
            ["reason"],
            registry=registry,
        )
        self.preemptions = Counter(
            f"{prefix}_preemptions",
            "Running jobs that stopped with a checkpoint for a job of a higher priority. If it rises often, jobs spend "
            "time on restarts: add nodes, or set the chart value preemption to Never.",
            registry=registry,
        )
        self.failures_ignored = Counter(
            f"{prefix}_failures_ignored",
            "Failures that do not count towards runPolicy.backoffLimit, because a rule with onNodeConditions or "
            "onPodConditions in runPolicy.failureRules has the action Ignore. If it rises, look at the nodes that the "
            "events FailureIgnored name.",
            registry=registry,
        )
        self.node_faults = Counter(
            f"{prefix}_node_faults",
            "Faults of nodes that jobs or node conditions showed, by kind. If it rises, look at the nodes that the "
            "events NodeLeftOut name.",
            ["kind"],
            registry=registry,
        )
        self.nodes_left_out = Gauge(
            f"{prefix}_nodes_left_out",
            "Nodes that new plans leave out because of repeated faults, by scope: plans of all namespaces, or of one "
            "namespace. Repair them, or annotate them with dljob.dev/ignore-faults=true.",
            ["scope"],
            registry=registry,
        )
        self.hardware_probes = Counter(
            f"{prefix}_hardware_probes",
            "Hardware probes that ended, by result: measured, failed, refused (by the API server) or gave_way (to a "
            "job). If failed or refused rises, look at the events HardwareNotMeasured.",
            ["result"],
            registry=registry,
        )
        self.requests = Counter(
            f"{prefix}_api_requests",
            "Requests to the API server by verb, resource and code. Code 0: no answer.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.request_s = Histogram(
            f"{prefix}_api_request_duration_seconds",
            "Time until the API server answered.",
            ["verb"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15),
            registry=registry,
        )
        for kind in FaultKind:
            self.node_faults.labels(kind.value)
        for result in ("measured", "failed", "refused", "gave_way"):
            self.hardware_probes.labels(result)
        self.count_left_out(())
        for phase in PHASES:
            self.jobs.labels(phase)
        for result in _RESULTS:
            self.reconciles.labels(result)
        for reason in ("no_plan", "queued"):
            self.waiting_jobs.labels(reason)
        self.forecast((), 0)
        self.count_deadlines(())
        for result in ("accepted", "infeasible"):
            self.plans.labels(result)
        for outcome in ("Complete", "Failed"):
            self.finished.labels(outcome)
        for reason in _RESIZES:
            self.resizes.labels(reason)

    def record_transition(self, before: DLJobStatus, after: DLJobStatus, namespace: str) -> None:
        """Count what has happened to a job between two of its statuses.

        Count its restarts, repeated steps, preemptions, ignored failures, divergences (ranks with different
        parameters), moves to other plans and refused changes of the spec, and its end. If the job has just finished,
        also observe the error of its predicted step time. ``namespace``: the label under which its use of devices,
        energy and money counts.
        """
        self._count_usage(before.usage, after.usage, namespace)
        self.recoveries.inc(max(0, after.restarts - before.restarts))
        self.steps_repeated.inc(max(0, _steps_repeated(after) - _steps_repeated(before)))
        self.preemptions.inc(max(0, (after.preemptions or 0) - (before.preemptions or 0)))
        self.failures_ignored.inc(max(0, (after.failures_ignored or 0) - (before.failures_ignored or 0)))
        self.diverged.inc(max(0, _diverged(after) - _diverged(before)))
        if (refused := _refused(after)) is not None and refused != _refused(before):
            self.changes_refused.inc()
        if (reason := _resized(before, after)) is not None:
            self.resizes.labels(reason).inc()
        for outcome in ("Complete", "Failed"):
            if is_true(after.conditions, outcome) and not is_true(before.conditions, outcome):
                self.finished.labels(outcome).inc()
                if after.measured is not None and after.measured.step_error is not None:
                    self.plan_error.observe(after.measured.step_error)

    def _count_usage(self, before: Usage | None, after: Usage | None, namespace: str) -> None:
        if after is None or after == before:
            return
        old = before or Usage(time=after.time)
        self.device_seconds.labels(namespace).inc(max(0.0, after.device_seconds - old.device_seconds))
        self.energy_J.labels(namespace).inc(max(0.0, after.energy_joules - old.energy_joules))
        self.cost_usd.labels(namespace).inc(max(0.0, after.cost - old.cost))
        if after.carbon_grams is not None:
            self.carbon_g.labels(namespace).inc(max(0.0, after.carbon_grams - (old.carbon_grams or 0.0)))

    def forecast(self, starts: Sequence[Interval], unknown: int) -> None:
        """Set the gauges of the queue's forecast.

        ``starts``: for each waiting job with a forecast, the seconds until it starts. ``unknown``: number of waiting
        jobs without a forecast.
        """
        for position, choose in (("first", min), ("last", max)):
            self.queue_start_s.labels(position, "p50").set(choose((each.p50 for each in starts), default=0.0))
            self.queue_start_s.labels(position, "p90").set(choose((each.p90 for each in starts), default=0.0))
        self.without_forecast.set(unknown)

    def count_deadlines(self, statuses: Iterable[str], slacks_s: Sequence[float] = ()) -> None:
        """Set the gauges of jobs with a deadline.

        ``statuses``: for each job with finishBy, the status (True, False or Unknown) of its condition DeadlineFeasible.
        ``slacks_s``: for each job that trains with a deadline, the seconds from its predicted end to the deadline.
        """
        self.deadline_slack_s.set(min(slacks_s, default=nan))
        self.deadlines_at_risk.set(sum(slack_s < 0 for slack_s in slacks_s))
        counts = Counts(statuses)
        for status in ConditionStatus:
            self.deadlines.labels(status.value).set(counts[status.value])

    def count_forecasts(self, found: Mapping[str, NamespaceForecast]) -> None:
        """Set the gauges of the forecasts of jobs that hold devices. ``found``: by namespace."""
        self.remaining_device_s.clear()
        self.stop_device_s.clear()
        for namespace, each in found.items():
            for percentile, seconds in each.remaining_s.items():
                self.remaining_device_s.labels(namespace, percentile).set(seconds)
            self.stop_device_s.labels(namespace).set(each.stop_s)

    def count_left_out(self, entries: Iterable[LeftOut]) -> None:
        """Set the gauge of nodes that new plans leave out because of faults.

        ``entries``: one for each node and namespace. A node that is left out for several namespaces counts once.
        """
        scopes = {(item.node, item.namespace == EVERY_NAMESPACE) for item in entries}
        every = {node for node, for_all in scopes if for_all}
        self.nodes_left_out.labels("all").set(len(every))
        self.nodes_left_out.labels("namespace").set(len({node for node, _ in scopes} - every))

    def planned(self, seconds: float, accepted: bool | None) -> None:
        """Observe the seconds that a plan took, and count its result.

        ``accepted``: True: a plan was made. False: no plan is possible. None: planning failed, and is not counted.
        """
        self.planning_s.observe(seconds)
        if accepted is not None:
            self.plans.labels("accepted" if accepted else "infeasible").inc()

    def requested(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request to the API server and observe its duration in seconds.

        ``resource``: plural of a Kubernetes kind. ``code``: HTTP status of the answer; 0: there was no answer.
        """
        self.requests.labels(verb, resource, str(code)).inc()
        self.request_s.labels(verb).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format whose content type is ``CONTENT_TYPE``."""
        return generate_latest(self.registry)
