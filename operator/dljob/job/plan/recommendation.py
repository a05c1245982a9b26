"""Recommendation of a plan for a job's manifest and a cluster, as objects or as JSON. This module does no I/O."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

from pydantic import ValidationError

from dljob.api import API_VERSION, DLJobSpec, DLProfile, Rejected
from dljob.api.crd import JOB_NAME_RULE
from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.api.metadata import metadata_error
from dljob.cluster import ClusterView, cluster_view
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates
from dljob.job.defaults import (
    ROOT,
    applied,
    applied_site,
    parse_defaults,
    site_of,
    with_defaults,
)
from dljob.job.plan.grace import assumed_bandwidth, too_short_grace
from dljob.job.plan.request import planner_request, train_samples
from dljob.job.plan.status import plan_status, predicted
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import learned, learned_by_model
from dljob.job.scale_up import missing_nodes, plan_on_new_nodes, waiting_text
from dljob.job.spec_errors import InvalidSpecError, in_words, problems_of
from dljob.planner import Decision, Infeasible, Learned, Request, VolumeLimit, plan
from dljob.planner.candidates.pools import allowed
from dljob.planner.observed import described

CONVERTED = ("int_type", "float_type", "bool_type", "string_type")
"""Types of errors by which pydantic refuses a value of another type. Elsewhere, it parses texts, such as dates."""
NAME = re.compile("[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Job names that satisfy both Kubernetes' rules for names and JOB_NAME_RULE."""

DEFAULT_NAMESPACE = "default"
"""Namespace of a job whose manifest names none, where no kubeconfig names one."""

Constants = Mapping[tuple[str, str], Learned]


@dataclass(frozen=True)
class Job:
    """A DLJob to plan. It need not exist on a cluster: a manifest is enough. ``namespace``: None if none is given."""

    name: str
    namespace: str | None
    spec: DLJobSpec
    manifest: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The manifest as the user wrote it."""


@dataclass(frozen=True)
class Recommendation:
    job: Job
    """The job, with the administrator's defaults in place of unset fields of its spec."""
    request: Request
    """The planner request. If the job has a ``batchSizeRange``, it holds the chosen global batch size."""
    answer: Decision | Infeasible
    view: ClusterView
    """The nodes for which the job was planned. If the existing nodes cannot run it, this includes the nodes that an
    autoscaler can add."""
    defaults: tuple[str, ...] = ()
    """The job's values that come from the administrator's defaults, as ``job.defaults.applied`` returns them."""

    def document(self) -> dict[str, Any]:
        """Return the recommendation as a JSON object with the keys ``job``, ``plan``, ``warning`` and ``infeasible``.

        ``plan`` has the form of the job's status.plan, and is None if no plan is possible. ``infeasible`` then says
        why, and is None otherwise. ``warning``: text about the plan; None without a warning. ``unsupported``: better
        plans that the trainer cannot run yet, each with ``summary``, ``reason`` and ``predicted``.
        """
        better = [
            {"summary": u.summary, "reason": u.reason, "predicted": predicted(u.prediction).manifest()}
            for u in self.answer.unsupported
        ]
        if isinstance(self.answer, Infeasible):
            found = self.answer
            rejected = [Rejected(summary=r.summary, reason=r.reason).manifest() for r in found.refusals]
            problem = {
                "reason": found.reason,
                "field": found.field,
                "message": found.message,
                "transient": found.transient,
                "rejected": rejected,
            }
            return {"job": self.job.name, "plan": None, "warning": None, "infeasible": problem, "unsupported": better}
        job = self.job
        digest = trainer_plan(
            job.name, job.namespace or DEFAULT_NAMESPACE, "none", job.spec, self.answer, 1, 1, job.name, "cluster.local"
        ).digest()
        shown = plan_status(job.spec, self.answer, 1, digest, self.defaults).manifest()
        warning = self.answer.warning
        return {"job": job.name, "plan": shown, "warning": warning, "infeasible": None, "unsupported": better}


def parse_job(manifest: object) -> Job:
    """Parse the manifest of a DLJob. Raise ValueError with the field, the value and what is expected."""
    if not isinstance(manifest, Mapping):
        raise ValueError(f"manifest: found {type(manifest).__name__}; expected a mapping")  # noqa: TRY004 - user input
    if (manifest.get("apiVersion"), manifest.get("kind")) != (API_VERSION, "DLJob"):
        found = f"apiVersion {manifest.get('apiVersion')!r}, kind {manifest.get('kind')!r}"
        raise ValueError(f"manifest: found {found}; expected apiVersion {API_VERSION}, kind DLJob")
    metadata, spec = manifest.get("metadata"), manifest.get("spec")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if isinstance(metadata, Mapping) and name is None and "generateName" in metadata:
        found = f"generateName {metadata['generateName']!r:.60} without a name"
        raise ValueError(
            f"metadata.name: found {found}; expected a name, by which dljob finds the job. Add metadata.name"
        )
    if not isinstance(metadata, Mapping) or not isinstance(name, str) or not NAME.fullmatch(name):
        found = "nothing" if name is None else repr(name)
        raise ValueError(f"metadata.name: found {found}; {JOB_NAME_RULE.message}")
    if (wrong := metadata_error(metadata)) is not None:
        raise ValueError(wrong)
    if not isinstance(spec, Mapping):
        found = "nothing" if spec is None else f"{spec!r:.100}"
        raise ValueError(f"spec: found {found}; expected a mapping with the fields of a job")  # noqa: TRY004 - user input
    namespace = metadata.get("namespace")
    try:
        parsed = DLJobSpec.model_validate(spec)
    except ValidationError as error:
        raise InvalidSpecError(problems_of(error)) from None
    _check_types(spec)
    return Job(name, str(namespace) if namespace else None, parsed, manifest)


def _check_types(spec: Mapping[str, Any]) -> None:
    """Raise ValueError for values that pydantic converts and the API server refuses, such as '5' for a number."""
    try:
        text = json.dumps(spec, default=_as_text, allow_nan=False)
    except ValueError:
        raise ValueError("spec: found a number that is not finite; expected finite numbers") from None
    try:
        DLJobSpec.model_validate_json(text, strict=True)
    except ValidationError as error:
        if found := problems_of(error, types=CONVERTED):
            raise InvalidSpecError(found) from None


def _as_text(value: object) -> str:
    """Return a date of YAML as the text that a user has written; the API server knows no dates."""
    return value.isoformat() if isinstance(value, date) else str(value)


def checked_profiles(documents: object) -> tuple[Mapping[str, Any], ...]:
    """Return the DLProfile objects in a list, in the form in which the API server returns them.

    Raise ValueError for invalid objects.
    """
    if not isinstance(documents, list):
        raise ValueError(f"profiles: found {type(documents).__name__}; expected a list of DLProfile objects")  # noqa: TRY004 - user input
    for i, document in enumerate(documents):
        body = document if isinstance(document, Mapping) else {}
        try:
            profile = DLProfile.model_validate({"spec": body.get("spec"), "status": body.get("status") or {}})
            learned(profile.status, profile.spec.device)
        except ValidationError as error:
            raise ValueError(in_words(error, f"profiles[{i}]")) from None
    return tuple(documents)


def recommend(
    job: Job,
    view: ClusterView,
    constants: Constants,
    defaults: JobDefaults = NO_DEFAULTS,
    templates: NodeTemplates = NO_TEMPLATES,
    begin_s: float = 0.0,
    volumes: tuple[VolumeLimit, ...] = (),
    now: datetime | None = None,
) -> Recommendation:
    """Return the plan that a new job would get on the nodes of ``view``, or the reason why it would get none.

    ``constants``: measured constants by (model key, device type). ``defaults``: the administrator's defaults for unset
    fields of the spec. ``templates``: nodes that an autoscaler can add, used only if the nodes of ``view`` cannot run
    the job. ``begin_s``: seconds from midnight UTC to the start of the training, for carbon intensities by hour.
    ``volumes``: the claims of the job that only some nodes can mount. ``now``: the time, to warn of a time that has
    passed; None: no such warning. Raise ValueError for a job with ``spec.task``, which has no model before a pod has
    looked at its data.
    """
    if job.spec.task is not None:
        raise ValueError(
            "spec.task: found a task; expected a job with a model, on which the plan depends. A pod of the job chooses "
            "it: apply the job with planning.mode: PlanOnly to see the plan, or run dljob suggest"
        )
    lines = applied(job.spec, defaults)
    job = replace(job, spec=with_defaults(job.spec, defaults))
    request = planner_request(job.name, job.spec, site=site_of(defaults), begin_s=begin_s, volumes=volumes)
    request = described(replace(request, asks_unsupported=True), constants)
    found = plan(request, view, constants)
    if isinstance(found, Infeasible) and (larger := plan_on_new_nodes(request, view, constants, templates)):
        decision, larger_view = larger
        awaited = waiting_text(missing_nodes(request, decision, allowed(request, view)))
        found = replace(decision, warning="; ".join(text for text in (decision.warning, awaited) if text))
        view = larger_view
    if isinstance(found, Decision):
        notes = (
            found.warning,
            too_short_grace(job.spec, found),
            assumed_bandwidth(job.spec, found.checkpoint_s),
            *_without_effect(job.spec, now),
        )
        found = replace(found, warning="; ".join(text for text in notes if text) or None)
        lines += applied_site(defaults, (group.device for group in found.chosen.groups))
    if isinstance(found, Decision) and found.batch is not None:
        request = replace(request, global_batch=found.batch.chosen, total_steps=found.batch.steps, batches=None)
    return Recommendation(job, request, found, view, lines)


def _without_effect(spec: DLJobSpec, now: datetime | None) -> list[str]:
    """Return texts about values that have no effect on a new job. Rules of the API must not refuse stored jobs."""
    found, finish_by = list[str](), spec.scheduling.finish_by
    if now is not None and finish_by is not None and finish_by <= now:
        found.append(
            f"spec.scheduling.finishBy: found {finish_by.isoformat()}, which has passed; expected a time in the "
            "future, because the queue does not prefer jobs that cannot meet their deadline. Correct it, or remove it"
        )
    data = spec.dataset
    if data.name is not None and data.samples not in (None, train_samples(spec)):
        found.append(
            f"spec.dataset.samples: found {data.samples}; expected {train_samples(spec)}, the training samples of the "
            f"built-in data set {data.name.value}, with which dljob plans and trains. Remove dataset.samples"
        )
    return found


def answer(
    question: object,
    view: ClusterView | None = None,
    constants: Constants | None = None,
    begin_s: float = 0.0,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Answer the request ``{"job": manifest, "cluster": {"nodes": […]}, "profiles": […]}`` with a recommended plan.

    The request may also have the key ``jobDefaults``, the chart's value of this name. Of the profiles, those count that
    the operator would use in the namespace of the job (``DEFAULT_NAMESPACE`` if the job names none). ``question`` and
    the result are objects as read from JSON. ``view``: the cluster to plan for if ``question`` has no key ``cluster``;
    None: the key is required. ``constants``: measured constants by (model or training script, device) to use if
    ``question`` has no key ``profiles``; None: there are none. ``begin_s``: seconds from midnight UTC to the start of
    the training. ``now``: the time, as of ``recommend``. Raise ValueError for an invalid ``question``.
    """
    keys = {"job", "cluster", "profiles", ROOT}
    if not isinstance(question, Mapping) or set(question) - keys or "job" not in question:
        found = sorted(map(str, question)) if isinstance(question, Mapping) else type(question).__name__
        raise ValueError(
            f"request: found {found}; expected a JSON object with the keys job, cluster and, optionally, profiles and "
            f"{ROOT}"
        )
    job = parse_job(question["job"])
    if "cluster" in question:
        view = cluster_view(question["cluster"])
    if view is None:
        raise ValueError(
            'cluster: found none in the request; expected {"nodes": [...]}, because the service was started without '
            "--cluster. Add the cluster to the request"
        )
    known = constants or {}
    if "profiles" in question:
        known = learned_by_model(checked_profiles(question["profiles"]), job.namespace or DEFAULT_NAMESPACE)
    defaults = parse_defaults(question[ROOT]) if ROOT in question else NO_DEFAULTS
    return recommend(job, view, known, defaults, begin_s=begin_s, now=now).document()
