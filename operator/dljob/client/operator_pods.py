"""The administrator's settings for jobs, from the chart's values or from the pods of operators.

These are the defaults of jobs, and the nodes that an autoscaler can add.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.client import files
from dljob.client.errors import BadInputError
from dljob.cluster.platforms import ARCHITECTURE_LABEL
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates, parse_templates
from dljob.job.defaults import ROOT, parse_defaults

NAME_LABEL, CONTAINER = "app.kubernetes.io/name", "operator"
DEFAULTS_VARIABLE, NAMESPACES_VARIABLE = "DLJOB_JOB_DEFAULTS", "DLJOB_WATCH_NAMESPACES"
IMAGE_VARIABLE = "DLJOB_TRAINER_IMAGE"
ARCHITECTURES_VARIABLE = "DLJOB_NODE_ARCHITECTURES"
TEMPLATES_VARIABLE, TEMPLATES_VALUE = "DLJOB_NODE_TEMPLATES", "autoscaling.nodeTemplates"


@dataclass(frozen=True)
class OperatorPod:
    """A pod of an operator in the cluster, with those of its settings that affect plans. ``name``: namespace/name."""

    name: str
    namespaces: tuple[str, ...]
    """Namespaces that the operator manages; empty: all."""
    defaults: str
    """The administrator's defaults of jobs, as JSON."""
    templates: str = "[]"
    """Nodes that an autoscaler can add, as JSON."""
    trainer_image: str = ""
    architectures: tuple[str, ...] = ()
    """Processor architectures of the nodes of jobs; empty: unknown."""


def from_file(path: str) -> JobDefaults:
    """Return the administrator's defaults of jobs from a file with values of the chart.

    ``helm get values dljob -o yaml`` writes such a file. Raise BadInputError if the file cannot be read, lacks the key
    ``jobDefaults`` or has invalid defaults.
    """
    found = files.documents(path)
    if len(found) != 1 or not isinstance(found[0], Mapping) or ROOT not in found[0]:
        keys = ", ".join(map(str, found[0])) if len(found) == 1 and isinstance(found[0], Mapping) else "no mapping"
        raise BadInputError(f"{path}: found {keys or 'no keys'}; expected the key {ROOT}, as in values of the chart")
    try:
        return parse_defaults(found[0][ROOT] or {})
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from None


def operator_pods(
    pods: Iterable[Mapping[str, Any]], nodes: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[OperatorPod, ...]:
    """Return the pods of operators among ``pods``, with the settings in the environment variables of their containers.

    ``pods``: all pods of the cluster, as API objects. ``nodes``: name of each node → its labels. The architecture of
    its node is the default for one of the settings.
    """
    found = []
    for pod in pods:
        if (pod["metadata"].get("labels") or {}).get(NAME_LABEL) != "dljob":
            continue
        for container in pod["spec"].get("containers") or ():
            env = {item["name"]: item.get("value") or "" for item in container.get("env") or ()}
            if container["name"] == CONTAINER and NAMESPACES_VARIABLE in env:
                names = tuple(name.strip() for name in env[NAMESPACES_VARIABLE].split(",") if name.strip())
                full = f"{pod['metadata'].get('namespace')}/{pod['metadata']['name']}"
                texts = env.get(DEFAULTS_VARIABLE) or "{}", env.get(TEMPLATES_VARIABLE) or "[]"
                own = (nodes or {}).get(pod["spec"].get("nodeName") or "", {}).get(ARCHITECTURE_LABEL, "")
                listed = (env.get(ARCHITECTURES_VARIABLE) or own).split(",")
                built_for = tuple(sorted({name.strip() for name in listed if name.strip()}))
                found.append(OperatorPod(full, names, *texts, env.get(IMAGE_VARIABLE) or "", built_for))
    return tuple(found)


def architectures(pods: Iterable[OperatorPod], namespace: str | None = None) -> tuple[str, ...]:
    """Return the architectures of nodes for jobs, from the settings of the operators that manage a namespace.

    Return an empty tuple if they are unknown. The replicas of an operator may run on nodes of different architectures;
    those of all of them count. ``namespace``: None for all operators.
    """
    managing = pods if namespace is None else _managing(pods, namespace)
    return tuple(sorted({name for pod in managing for name in pod.architectures}))


def of_namespace(pods: Iterable[OperatorPod], namespace: str) -> JobDefaults:
    """Return the defaults of jobs in a namespace from the operators that manage it; ``NO_DEFAULTS`` if there are none.

    Raise BadInputError if the operators have different defaults, as during an upgrade, or if the defaults are invalid
    for this release.
    """
    managing = _managing(pods, namespace)
    if (text := _same(ROOT, {pod.defaults for pod in managing}, managing, namespace)) is None:
        return NO_DEFAULTS
    try:
        return parse_defaults(json.loads(text))
    except ValueError as error:
        raise _other_release(managing[0], error) from None


def trainer_image(pods: Iterable[OperatorPod]) -> str | None:
    """Return the trainer image of the operators; None if there is none.

    Raise BadInputError if they have different images. Any user who may create pods can make one that looks like an
    operator, and must not choose the image that other users run.
    """
    found = {pod.trainer_image: pod.name for pod in pods if pod.trainer_image}
    if len(found) > 1:
        texts = ", ".join(f"{image} in {name}" for image, name in sorted(found.items())[:4])
        raise BadInputError(
            f"--image: found operators with different trainer images ({texts}); expected one image. Name the right one "
            "with --image"
        )
    return next(iter(found), None)


def templates_of_namespace(pods: Iterable[OperatorPod], namespace: str) -> NodeTemplates:
    """Return the nodes that an autoscaler can add, from the settings of the operators that manage a namespace.

    Return ``NO_TEMPLATES`` if no operator manages it. Raise BadInputError if the operators have different settings, as
    during an upgrade, or if a setting is invalid for this release.
    """
    managing = _managing(pods, namespace)
    if (text := _same(TEMPLATES_VALUE, {pod.templates for pod in managing}, managing, namespace)) is None:
        return NO_TEMPLATES
    try:
        return NodeTemplates(parse_templates(text, architectures(managing)))
    except ValueError as error:
        raise _other_release(managing[0], error) from None


def _managing(pods: Iterable[OperatorPod], namespace: str) -> list[OperatorPod]:
    return [pod for pod in pods if not pod.namespaces or namespace in pod.namespaces]


def _same(value: str, texts: set[str], pods: Iterable[OperatorPod], namespace: str) -> str | None:
    """Return the setting that all operators of a namespace have in common; None if there is no operator.

    ``value``: name of the chart value, for the error message. ``texts``: the set of its values in ``pods``, the
    operators that manage the namespace. Raise BadInputError if the set has several elements.
    """
    if len(texts) > 1:
        names = ", ".join(pod.name for pod in list(pods)[:4])
        raise BadInputError(
            f"{value}: found different values in the operators of namespace {namespace} ({names}); expected the "
            "same value. Try again when all operators have been upgraded, or choose the value with --defaults FILE"
        )
    return next(iter(texts), None)


def _other_release(pod: OperatorPod, error: ValueError) -> BadInputError:
    return BadInputError(
        f"{pod.name}: {error}. If the operator is of another release, use the dljob command of that release, or "
        "--defaults FILE"
    )
