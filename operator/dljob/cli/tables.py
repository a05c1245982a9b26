"""Format the output of `dljob plan`: the table of candidates, details of the plan, the scaling curve. No I/O."""

from collections.abc import Sequence

from dljob.api import Framework
from dljob.api.spec.trainer import AgentSource
from dljob.job.plan.recommendation import Recommendation
from dljob.job.plan.request import learning_rate_rule
from dljob.job.plan.status import enabled_by
from dljob.perf.step.backends import source
from dljob.planner import BatchDecision, Choice, Decision, FrameworkPlan, Infeasible, Prediction
from dljob.planner.observed import text_of
from dljob.planner.placement import explanation
from dljob.planner.types.texts import dollars, duration, gibibytes, grams, joules, of_which, plain

BAR = 30
UNLIKE = 1.1
"""Ratio of the memory of pods of two groups above which the amount of each group is shown, and not only the largest."""
BASIS = {
    "catalogue": "data sheets; later plans use the measurements of the first run",
    "probe": "measured hardware (dljob probe); later plans use the measurements of the first run",
    "profile": "measurements of earlier runs (kubectl get dlprofiles)",
}
BASIS_OF_PARTS = BASIS | {
    "catalogue": "data sheets; later plans use the step of the first run with this strategy",
    "probe": "measured hardware (dljob probe); later plans use the step of the first run with this strategy",
}

BASIS_OF_SCRIPT = BASIS | {
    "catalogue": "data sheets; later plans use the first run only if the spec has no model",
    "probe": "measured hardware (dljob probe); later plans use the first run only if the spec has no model",
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with the line ``header`` above ``rows``.

    Columns with a cell that begins with a digit are right-aligned. The first and all other columns are left-aligned.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    words = [all(not row[i][:1].isdigit() for row in rows) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 or wordy else cell.rjust(width)
            for i, (cell, width, wordy) in enumerate(zip(row, widths, words, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def cost(usd: float | None) -> str:
    return "-" if usd is None else dollars(usd)


def _row(choice: Choice, chosen: bool) -> list[str]:
    p = choice.prediction
    return [
        ("* " if chosen else "  ") + choice.summary,
        duration(p.step_s),
        duration(p.step_p90_s),
        plain(p.samples_per_s, 4),
        f"{100 * p.efficiency:.0f} %",
        duration(p.total_s) if p.total_s else "-",
        joules(p.energy_J) if p.energy_J is not None else "-",
        cost(p.cost_usd),
        *([grams(p.carbon_g)] if p.carbon_g is not None else []),
    ]


HEADER = ["  PLAN", "STEP", "P90", "SAMPLES/S", "EFFICIENCY", "TRAINING", "ENERGY", "COST"]


def _header(chosen: Choice) -> list[str]:
    """Return the names of the columns of a table of plans. All plans of a job have the column CO2, or none has it."""
    return HEADER if chosen.prediction.carbon_g is None else [*HEADER, "CO2"]


def decision(found: Decision, *, by_script: bool = False) -> list[str]:
    """Return the lines that show a plan: the considered plans, the details of the chosen plan, and what was ruled out.

    The table of considered plans (candidates) begins with the best. If times cannot be predicted, only the chosen plan
    is shown. ``by_script``: True for scripts for Torchrun and MPI, whose ranks do not measure their steps.
    """
    p = found.chosen.prediction
    if p.step_s <= 0:
        return _unpredicted(found)
    header = _header(found.chosen)
    lines = table(header, [_row(c, c == found.chosen) for c in found.candidates])
    lines += ["", f"Bottleneck: {p.bottleneck}", f"Step:       {_parts(p)}"]
    if found.links:
        lines.append(f"Links:      {found.links}")
    lines.append(f"Memory:     {gibibytes(p.memory_nbytes)} for the largest rank, {_of_pod(found)}")
    if parts := of_which(p.total_s, p.fetch_s, p.evaluations_s, p.checkpoints_s):
        lines.append(f"Training:   {duration(p.total_s)}{parts}")
    basis = BASIS_OF_PARTS if found.chosen.in_parts else BASIS_OF_SCRIPT if by_script else BASIS
    lines.append(f"Based on:   {basis[p.basis]}")
    if found.data_text:
        lines.append(f"Dataset:    {found.data_text}")
    if found.precision_reason:
        lines.append(f"Precision:  {found.precision_reason}")
    if found.recomputation_reason:
        used = "used" if found.chosen.recomputes else "not used"
        lines.append(f"Activation checkpointing: {used}: {found.recomputation_reason}")
    if text := explanation(found):
        lines.append(f"Placement:  {text}")
    if found.power_advice:
        lines.append(f"Power:      {found.power_advice}")
    if found.next_measurement:
        lines.append(f"Next most informative measurement: {found.next_measurement}")
    if found.warning:
        lines.append(f"Warning:    {found.warning}")
    if len(found.trade_offs) > 1:
        lines += [
            "",
            "Trade-offs: plans that no other considered plan beats in time, energy and cost at once",
        ]
        rows = [_row(c, c == found.chosen) for c in found.trade_offs]
        first = HEADER.index("TRAINING")
        lines += table([header[0], *header[first:]], [[row[0], *row[first:]] for row in rows])
    lines += _power_limits(found)
    if found.refusals:
        lines += ["", "Ruled out", *(f"  {r.summary}: {r.reason}" for r in found.refusals)]
    return lines + _unsupported(found)


def _power_limits(found: Decision) -> list[str]:
    """Return the lines that compare the chosen plan under several power limits.

    An asterisk marks the present limits, and > the advised ones.
    """
    if not found.power_limits:
        return []
    header = ["  LIMIT", "STEP", "P90", "TRAINING", "ENERGY", "COST", *_header(found.chosen)[len(HEADER) :]]
    rows = []
    for each in found.power_limits:
        p, mark = each.prediction, "* " if each.now else "> " if each.advised else "  "
        times = [duration(p.step_s), duration(p.step_p90_s), duration(p.total_s), joules(p.energy_J or 0)]
        carbon = [] if p.carbon_g is None else [grams(p.carbon_g)]
        rows.append([mark + each.limits, *times, cost(p.cost_usd), *carbon])
    title = "Power limits: the chosen plan if its GPUs ran under others, which dljob does not set (* now, > advised)"
    return ["", title, *table(header, rows)]


def _unsupported(found: Decision | Infeasible) -> list[str]:
    """Return the lines about plans that would fit or would be better, but that the trainer cannot run yet."""
    if not found.unsupported:
        return []
    return ["", "The trainer cannot run this yet", *(f"  {u.summary}: {u.reason}" for u in found.unsupported)]


def _unpredicted(found: Decision) -> list[str]:
    """Return the lines that show a plan if the job's spec lacks fields that the prediction of times needs."""
    lines = ["  PLAN", f"* {found.chosen.summary}", "", f"Memory:     {_of_pod(found)}"]
    if text := explanation(found):
        lines.append(f"Placement:  {text}")
    if found.warning:
        lines.append(f"Warning:    {found.warning}")
    if found.refusals:
        lines += ["", "Ruled out", *(f"  {r.summary}: {r.reason}" for r in found.refusals)]
    return lines


def _of_pod(found: Decision) -> str:
    """Return the text about the memory of a pod, and where it comes from if earlier runs have shown it."""
    why = f" ({found.memory_text})" if found.memory_text else ""
    amounts = found.chosen.pods_nbytes
    if max(amounts) > UNLIKE * min(amounts):
        groups = zip(found.chosen.groups, amounts, strict=True)
        return ", ".join(f"{gibibytes(nbytes)} per pod on {group.device}" for group, nbytes in groups) + why
    return f"{gibibytes(found.chosen.prediction.host_memory_nbytes)} per pod{why}"


def _parts(p: Prediction) -> str:
    waiting_s = max(0.0, p.step_s - p.compute_s - p.communication_s - p.data_s)
    parts = {"computing": p.compute_s, "communication": p.communication_s, "data": p.data_s, "waiting": waiting_s}
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())


def infeasible(found: Infeasible) -> list[str]:
    lines = [f"No plan is possible: {found.reason}", f"  {found.field}: {found.message}"]
    if found.refusals:
        lines += ["", "Ruled out", *(f"  {r.summary}: {r.reason}" for r in found.refusals)]
    return lines + _unsupported(found)


def batches(found: BatchDecision, rule: str | None) -> list[str]:
    """Return lines about the choice of the global batch size, with a table of the considered sizes.

    ``rule``: description of the learning-rate scaling; None if the learning rate is not scaled.
    """
    lines = ["", f"Global batch: {found.text}"]
    if rule is not None:
        lines.append(f"Learning rate: scaled by {rule}")
    if not found.options:
        return lines
    rows = []
    for option in found.options:
        p = option.prediction
        costs = [duration(p.step_s), f"{option.steps}", duration(p.total_s)] if p else ["-", f"{option.steps}", "-"]
        costs += [joules(p.energy_J) if p and p.energy_J else "-", cost(p.cost_usd) if p else "-"]
        mark = "* " if option.batch == found.chosen else "  "
        rows.append([f"{mark}{option.batch}", f"{100 * option.efficiency:.0f} %", *costs, option.reason])
    header = ["  GLOBAL BATCH", "EFFICIENCY", "STEP", "STEPS", "SAME PROGRESS", "ENERGY", "COST", ""]
    return lines + table(header, rows)


def _head(found: Recommendation) -> str:
    """Return the first line of the output about a job: its name, model, number of steps, batch size and objective."""
    request = found.request
    script = "MPI program" if found.job.spec.trainer.framework is Framework.MPI else "training script"
    until = f", until {found.job.spec.until.text}" if found.job.spec.until is not None else ""
    if request.missing:
        known = isinstance(found.answer, Decision) and found.answer.chosen.prediction.step_s > 0
        times = "predicted from its observed structure" if known else "no predicted time"
        return f"{found.job.name}: {script}, {times}{until}"
    what = request.model or (script + (f" like {request.like}" if request.like else ""))
    steps = f"{request.total_steps} steps of {request.global_batch} samples"
    goal = f"minimize {request.minimize.lower()}"
    if request.deadline_s is not None:
        goal += f" within {duration(request.deadline_s)}"
    return f"{found.job.name}: {what}, {'at most ' if until else ''}{steps}{until}, {goal}"


_AGENTS = {
    AgentSource.INJECTED: "injected by an init container (trainer.agent Injected)",
    AgentSource.AUTO: "of the image if it is built FROM the trainer image, else injected (trainer.agent Auto)",
}


def recommendation(found: Recommendation) -> list[str]:
    given = ["", "Administrator's defaults", *(f"  {line}" for line in found.defaults)] if found.defaults else []
    if found.request.structure is not None:
        given += ["", f"Structure:  {text_of(found.request.structure)}"]
    if fields := enabled_by(found.request.missing, found.request.structure):
        given += ["", "Fields that are not set, and what they enable", *(f"  {line}" for line in fields)]
    if isinstance(found.answer, Infeasible):
        return [_head(found), "", *infeasible(found.answer), *given]
    trainer = found.job.spec.trainer
    about = [] if trainer.agent_source is AgentSource.FROM_IMAGE else [f"Agent:      {_AGENTS[trainer.agent_source]}"]
    if trainer.source is not None:
        about.append(f"Script:     {trainer.source.text}")
    given += ["", *about] if about else []
    body = [*decision(found.answer, by_script=found.request.reduced_by_script), *given]
    if found.answer.batch is not None:
        rule = learning_rate_rule(found.job.spec, found.answer.batch.chosen)
        body += batches(found.answer.batch, f"{rule[0]} from batch size {rule[1]}" if rule else None)
    return [_head(found), "", *body]


def frameworks(found: Sequence[FrameworkPlan]) -> list[str]:
    """Return lines with a table of the same job with each framework, their bottlenecks and the source of constants."""
    if not found:
        return ["", "Frameworks: no comparison, because the times of this job cannot be predicted"]
    planned = [(each, each.choice, each.choice.prediction) for each in found if each.choice is not None]
    lines = ["", "Frameworks: the same job, each with its best plan"]
    if planned:
        fastest = min(p.step_s for _, _, p in planned)
        rows = [
            [
                ("* " if p.step_s == fastest else "  ") + each.name,
                duration(p.step_s),
                duration(p.step_p10_s),
                duration(p.step_p90_s),
                plain(p.samples_per_s, 4),
                plain(p.throughput_per_latency, 4),
                f"{p.step_s / fastest:.2f}",
            ]
            for each, _, p in planned
        ]
        header = ["  FRAMEWORK", "STEP", "P10", "P90", "SAMPLES/S", "SAMPLES/S PER STEP S", "STEP / FASTEST"]
        lines += table(header, rows)
        lines += ["", *(f"  {each.name}: {choice.summary}; {p.bottleneck}" for each, choice, p in planned)]
        low = min(p.step_p90_s for _, _, p in planned if p.step_s == fastest)
        close = [each.name for each, _, p in planned if p.step_s != fastest and p.step_p10_s < low]
        if close:
            lines.append(
                f"  The interval from P10 to P90 of {' and that of '.join(close)} overlaps that of the fastest. "
                "Measure them if the difference matters"
            )
    lines += [f"  {each.name}: no plan: {each.reason}" for each in found if each.choice is None]
    if any(each.backend for each in found):
        origin = source()
        where = f"{origin.machine.split(', ')[0]}; {origin.links}"
        lines.append(f"  Constants of communication: measured on {origin.date} by {origin.command} ({where})")
    return lines


def scaling_curve(points: Sequence[tuple[int, Choice]], chosen: Choice) -> list[str]:
    """Return lines with a bar chart of throughput (samples per second) over the number of nodes.

    ``points``: (number of nodes, best plan for this number). With fewer than two points, return no lines. ``chosen``:
    the job's plan, whose number of nodes is marked.
    """
    if len(points) < 2:
        return []
    most = max(choice.prediction.samples_per_s for _, choice in points)
    nodes_chosen = sum(g.nodes for g in chosen.groups)
    rows = [
        [
            ("* " if nodes == nodes_chosen else "  ") + str(nodes),
            str(sum(len(g.shares) for g in choice.groups)),
            duration(choice.prediction.step_s),
            f"{100 * choice.prediction.efficiency:.0f} %",
            "#" * max(1, round(BAR * choice.prediction.samples_per_s / most))
            + f" {plain(choice.prediction.samples_per_s, 4)}",
        ]
        for nodes, choice in points
    ]
    header = ["  NODES", "RANKS", "STEP", "EFFICIENCY", "SAMPLES/S"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(4)]
    lines = [
        "  ".join([a.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)), last])
        for a, *cells, last in [header, *rows]
    ]
    return ["", "Scaling: the best plan for each number of nodes", *lines]
