"""Choose the domain of a plan: plan for each part of the cluster on its own, and compare the results."""

from collections.abc import Callable
from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.cluster.domains import Domain, domains
from dljob.planner.candidates.pools import usable
from dljob.planner.search import objective
from dljob.planner.types import Choice, Decision, Infeasible, Refusal, Request
from dljob.planner.types.texts import duration

PlanIn = Callable[[Request, ClusterView], Decision | Infeasible]


def in_best_domain(request: Request, view: ClusterView, plan_in: PlanIn) -> Decision | Infeasible:
    """Plan in each domain (rack, zone or other part of the cluster) on its own, and return the best of these plans.

    The best plans of other domains become candidates of the result. ``plan_in``: function that plans a request on the
    nodes of a view. If the cluster is not divided into domains, return the only plan unchanged. If no domain has a
    plan, return the ``Infeasible`` of the widest domain, which contains all others.
    """
    parts = domains(usable(request, view), request.topology, request.spot, avoid_spot=request.avoid_spot)
    answers = [(part, plan_in(replace(request, domain=part), part.within(view))) for part in parts]
    if len(parts) == 1 and not parts[0].text:
        return answers[0][1]
    found = [(part, answer) for part, answer in answers if isinstance(answer, Decision)]
    if not found:
        return answers[0][1]
    # Of equal plans, a plan in a narrow domain is bound to the place for which it was priced. On one node, there is
    # no network to bind, and a wide domain leaves the scheduler more nodes.
    found.sort(key=lambda item: (_nodes(item[1].chosen) > 1) is (item[0] is parts[0]))
    named = [(part, _named(part, answer)) for part, answer in found]
    best = objective.best(request, [answer.chosen for _, answer in named])
    part, decision = next(item for item in named if item[1].chosen is best)
    others = [answer.chosen for _, answer in named if answer is not decision]
    others.sort(key=lambda choice: objective.score(request, choice.prediction))
    shown = tuple(dict.fromkeys((best, *others, *decision.candidates)))[: max(1, request.candidates_kept)]
    refusals = [_slower(choice, best) for choice in others if choice not in shown]
    refusals += [
        Refusal(where.text, answer.message)
        for where, answer in answers
        if isinstance(answer, Infeasible) and where.text
    ]
    return replace(decision, candidates=shown, refusals=(*refusals, *decision.refusals), domain=part)


def explanation(decision: Decision) -> str | None:
    """Return a text with the plan's domain and its expected interruptions.

    Return None if the cluster is not divided into domains.
    """
    domain, prediction = decision.domain, decision.chosen.prediction
    if not domain.text:
        return None
    text = domain.text
    if domain.interruptions_per_h:
        text = f"{text}: {domain.interruptions_per_h:.3g} interruptions per hour of a node"
        if prediction.total_s > 0:
            text = f"{text}, {prediction.interruptions:.2g} restarts expected in {duration(prediction.total_s)}"
    return text


def _named(domain: Domain, decision: Decision) -> Decision:
    """Return the decision with the domain appended to the summary of each choice."""

    def named(choice: Choice) -> Choice:
        return replace(choice, summary=f"{choice.summary}, {domain.text}") if domain.text else choice

    return replace(
        decision,
        chosen=named(decision.chosen),
        candidates=tuple(map(named, decision.candidates)),
        trade_offs=tuple(map(named, decision.trade_offs)),
    )


def _slower(choice: Choice, best: Choice) -> Refusal:
    p, q = choice.prediction, best.prediction
    usd = f" and costs ${p.cost_usd or 0:.2f} instead of ${q.cost_usd or 0:.2f}"
    text = (
        f"not better than the chosen plan: training takes {duration(p.total_s)} instead of {duration(q.total_s)}{usd}"
    )
    return Refusal(choice.summary, text)


def _nodes(choice: Choice) -> int:
    return sum(group.nodes for group in choice.groups)
