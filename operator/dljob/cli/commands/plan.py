"""``dljob plan``: show the plan of a job, its predictions and the alternatives. The command changes nothing."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.calibrate.learned import measured_key
from dljob.cli import remote, tables
from dljob.client import files, operator_pods, preview
from dljob.client.errors import BadInputError
from dljob.client.preview import ClusterState
from dljob.cluster import hardware
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates
from dljob.job.identity import profile_key
from dljob.job.plan.recommendation import DEFAULT_NAMESPACE, Job, Recommendation
from dljob.job.plan.status import figures
from dljob.planner import Choice, Decision, FrameworkPlan, compare


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "plan",
        help="show the plan of a DLJob, other candidates and rejected options",
        description="Show the plan that a DLJob would get: candidates with predicted step time, throughput, "
        "efficiency, energy and cost, the bottleneck, and options that were ruled out. The command runs nothing. "
        "What a job of the manifest already uses counts as free. The command exits with 1 if no plan is possible, and "
        "with 2 for invalid input, or if the job exists and must not be changed to the manifest.",
        epilog="cluster.yaml contains nodes: [{name: gpu, count: 4, device: NVIDIA-A100-SXM4-40GB, devices: 8, "
        "cpu: 64, memory: 512Gi, bandwidth: 12.5G}, …]; see docs/explanation/planning.md.",
    )
    command.add_argument("file", metavar="JOB.yaml", help="manifest with one or more DLJobs; - for standard input")
    command.add_argument(
        "--cluster", metavar="FILE", help="plan for the cluster in this file instead of the current cluster"
    )
    command.add_argument(
        "--profiles", metavar="FILE", help="with --cluster: measured profiles (kubectl get dlprofiles -o yaml)"
    )
    command.add_argument(
        "--defaults",
        metavar="FILE",
        help="values of the Helm chart (helm get values dljob -n dljob-system -o yaml), whose jobDefaults fill the "
        "fields that a job leaves unset. Without this option: those of the operator in the current cluster; with "
        "--cluster: none",
    )
    command.add_argument(
        "--compare",
        choices=["frameworks"],
        help="also show the same job with dltrain over MPI, with Torchrun and gloo, and with a parameter server: step "
        "time with its 10th and 90th percentile, throughput, and throughput divided by step time",
    )
    remote.add_cluster(command)
    command.add_argument("--json", action="store_true", help="print one JSON document per job")
    command.add_argument("--plot", metavar="FILE.png", help="also plot the scaling curve (needs matplotlib)")
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    jobs = files.jobs(given.file)
    chosen = operator_pods.from_file(given.defaults) if given.defaults is not None else None
    refused: list[str] = []
    if given.cluster is not None:
        if options := remote.cluster_options(given):
            option, value = next(iter(options.items()))
            raise BadInputError(
                f"{option}: found {value} with --cluster; expected one of them, because a file describes the cluster. "
                f"Remove {option} or --cluster"
            )
        profiles = files.profiles(given.profiles) if given.profiles is not None else ()
        state = ClusterState(files.cluster(given.cluster), {}, profiles=profiles)
    elif given.profiles is not None:
        raise BadInputError(
            "--profiles: found this option without --cluster; expected both, because the current cluster has its own "
            "profiles. Add --cluster FILE or remove --profiles"
        )
    else:
        state, refused = remote.reach(lambda api: _observe(api, jobs, chosen))
        if state.warning is not None:
            print(f"dljob: {state.warning}", file=sys.stderr)
    code = 0
    for i, job in enumerate(jobs):
        namespace = _namespace(job, state)
        own = state.of_job(namespace, job.name)
        settings = _settings(job, state) if chosen is None else (chosen, NO_TEMPLATES)
        found, points = preview.planned(job, own, *settings, namespace)
        if given.profiles and (hint := _unused(found, own, namespace)):
            print(f"dljob: {job.name}: {hint}", file=sys.stderr)
        compared = None
        if given.compare:
            compared = compare(found.request, found.view, own.constants, found.job.spec.planning.uneven)
        if given.json:
            more = {} if compared is None else {"frameworks": [framework(each) for each in compared]}
            print(json.dumps(preview.document(found, points) | more, indent=2))
        else:
            lines = _lines(found, points) + (tables.frameworks(compared) if compared is not None else [])
            print("\n".join(["---"] * (i > 0) + lines))
        if given.plot and isinstance(found.answer, Decision):
            draw(Path(given.plot), i, found, points)
        code = code if isinstance(found.answer, Decision) else 1
    for line in refused:
        print(f"dljob: {line}", file=sys.stderr)
    return 2 if refused else code


async def _observe(api: Any, jobs: Sequence[Job], defaults: JobDefaults | None) -> tuple[ClusterState, list[str]]:
    """Return the state of the current cluster, and a line for each job that must not be changed to its manifest.

    ``defaults``: those for jobs; None: those of the operators in the cluster.
    """
    named = [(job, job.namespace or remote.default_namespace()) for job in jobs]
    state = await preview.with_volumes(api, await preview.observe(api), named, defaults)
    return state, await preview.refusals(api, named)


def _settings(job: Job, state: ClusterState) -> tuple[JobDefaults, NodeTemplates]:
    if not state.operators:  # Then the namespace does not matter, and there may be no kubeconfig to name it.
        return NO_DEFAULTS, NO_TEMPLATES
    return preview.defaults_of(state, job.namespace or remote.default_namespace())


def _namespace(job: Job, state: ClusterState) -> str:
    """Return the namespace of the job, or the one that it would get, in a real cluster or with profiles of namespaces.

    Otherwise, the namespace does not matter, and there may be no kubeconfig to name it.
    """
    of_some = any(profile["spec"].get("namespace") for profile in state.profiles)
    matters = state.without is not None or of_some
    if job.namespace or not matters:
        return job.namespace or DEFAULT_NAMESPACE
    try:
        return remote.default_namespace()
    except BadInputError:
        return DEFAULT_NAMESPACE


def _unused(found: Recommendation, own: ClusterState, namespace: str) -> str | None:
    """Return a hint for the user if no profile has the model of the job in the precision of its plan.

    With activation checkpointing, measurements without it also serve. ``own``: the state with the measured constants
    for ``namespace``, that of the job.
    """
    models = {model for model, _ in own.constants} - {hardware.KEY}
    chosen = found.answer.chosen if isinstance(found.answer, Decision) else None
    precision, recomputes = (chosen.precision, chosen.recomputes) if chosen else ("FP32", False)
    key = profile_key(found.job.spec)
    wanted = measured_key(key, precision, recomputes)
    if wanted in models or (recomputes and measured_key(key, precision) in models):
        return None
    others = {profile["spec"].get("namespace") for profile in own.profiles if profile["spec"]["model"] == wanted}
    if others:
        listed = ", ".join(sorted(map(str, others)))
        return (
            f"--profiles: found {wanted} for plans of namespace {listed} only; expected {namespace}, the namespace of "
            "the job. The plan uses data sheets"
        )
    if not models:
        return None
    return f"--profiles: found {', '.join(sorted(models))}; expected {wanted}. The plan uses data sheets"


def _lines(found: Recommendation, points: list[tuple[int, Choice]]) -> list[str]:
    lines = tables.recommendation(found)
    return lines + tables.scaling_curve(points, found.answer.chosen) if isinstance(found.answer, Decision) else lines


def framework(found: FrameworkPlan) -> dict[str, Any]:
    """Return a row of the comparison of frameworks as an object of the list for the key ``frameworks`` of the output.

    ``reason``: why there is no plan; only then, the other keys but ``name`` are missing. Times are in seconds.
    """
    if found.choice is None:
        return {"name": found.name, "reason": found.reason}
    p = found.choice.prediction
    return {
        "name": found.name,
        "plan": found.choice.summary,
        "nodes": sum(group.nodes for group in found.choice.groups),
        "collective": found.choice.collective,
        "stepSecondsP10": figures(p.step_p10_s),
        "stepSeconds": figures(p.step_s),
        "stepSecondsP90": figures(p.step_p90_s),
        "samplesPerSecond": figures(p.samples_per_s),
        "throughputPerLatency": figures(p.throughput_per_latency),
        "bottleneck": p.bottleneck,
    }


def draw(path: Path, index: int, found: Recommendation, points: Sequence[tuple[int, Choice]]) -> None:
    """Write a plot of step time (with its 90th percentile) and efficiency over the number of nodes.

    ``points``: (number of nodes, best plan for this number). ``index``: position of the job in the
    manifest. The plot of the first job (0) is written to ``path``. The file names of other plots also contain the name
    of the job. Raise BadInputError without matplotlib, or if writing fails.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInputError(
            "--plot: found no Python package matplotlib; expected this package. Run pip install './operator[plot]' in "
            "a clone of dljob"
        ) from None
    nodes = [n for n, _ in points]
    steps = [c.prediction.step_s for _, c in points]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    left.plot(nodes, steps, "o-", color="tab:blue", label="step time")
    left.fill_between(nodes, steps, [c.prediction.step_p90_s for _, c in points], alpha=0.2, label="up to p90")
    left.set(xlabel="nodes", ylabel="seconds per step", ylim=(0, None), title=f"{found.job.name}: predicted scaling")
    right = left.twinx()
    right.plot(nodes, [100 * c.prediction.efficiency for _, c in points], "s--", color="tab:orange", label="efficiency")
    right.set(ylabel="efficiency, %", ylim=(0, 105))
    if isinstance(found.answer, Decision):
        chosen = found.answer.chosen
        left.axvline(
            sum(g.nodes for g in chosen.groups), color="grey", linestyle=":", label=f"chosen: {chosen.summary}"
        )
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    left.legend(handles=handles, loc="best", fontsize="small")
    target = path if index == 0 else path.with_stem(f"{path.stem}-{found.job.name}")
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--plot: {target}: {error}") from None
