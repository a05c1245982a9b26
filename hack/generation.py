"""Write the generated files, and check that they are fresh.

The CRDs and the API reference come from the API types, the page of permissions from the chart's table, the page of the
command line from its argument parser, and the page of modules from their docstrings.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import cliref
import constantlist
import dashboard
import metriclist
import modulelist
from dljob.api import crd
from dljob.api.base import INT_OR_STRING
from dljob.api.change_rules import is_change_rule
from dljob.api.changes import CHANGES, Effect
from dljob.api.overrides import admission_policies

ROOT = Path(__file__).resolve().parent.parent
NOTE = "made by hack/generate from operator/dljob/api; change that, then run it again"
CHART_CRDS = "charts/dljob/files/crds"
"""Folder from which the chart's templates read the CRDs, so that Helm values decide whether to install or keep them."""

DASHBOARD = "charts/dljob/files/dashboard.json"
OVERRIDE_POLICIES = "charts/dljob/files/override-policies.yaml"
RBAC = "charts/dljob/files/rbac.yaml"

Schema = Mapping[str, Any]


def definition_yaml(definition: Schema) -> str:
    return f"# {NOTE}.\n" + yaml.safe_dump(dict(definition), sort_keys=False, width=110, allow_unicode=True)


def _type(schema: Schema) -> str:
    if enum := schema.get("enum"):
        return " \\| ".join(f"`{value}`" for value in enum)
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    if schema.get(INT_OR_STRING):
        return "integer or string"
    return str(schema.get("format") if schema.get("format") == "date-time" else schema.get("type", "any"))


def _bounds(schema: Schema) -> str:
    low = ">" if schema.get("exclusiveMinimum") else "≥"
    high = "<" if schema.get("exclusiveMaximum") else "≤"
    parts = [f"{low} {schema['minimum']}"] if "minimum" in schema else []
    parts += [f"{high} {schema['maximum']}"] if "maximum" in schema else []
    parts += [f"at most {schema['maxItems']} items"] if "maxItems" in schema else []
    pattern = str(schema.get("pattern", "")).replace("|", "\\|")
    parts += [f"matches `{pattern}`"] if pattern else []
    return ", ".join(parts)


def _scalar(value: Any) -> str:
    return "`" + (str(value).lower() if isinstance(value, bool) else repr(value) if value == "" else str(value)) + "`"


def _rows(schema: Schema, path: str) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        inner = field["items"] if field.get("type") == "array" else field
        nested = "properties" in inner
        if name in required:
            default = "required"
        elif "default" in field and not nested:
            default = _scalar(field["default"])
        else:
            default = ""
        words = [text for text in (field.get("description", ""), _bounds(field)) if text]
        rules = [f"**Rule:** {rule['message']}." for rule in inner.get("x-kubernetes-validations", ())]
        note = " ".join([f"{text.rstrip('.')}." for text in words] + rules)
        kind = ("list" if field.get("type") == "array" else "object") if nested else _type(field)
        yield f"| `{here}` | {kind} | {default} | {note} |"
        if nested:
            yield from _rows(inner, here + ("[]" if field.get("type") == "array" else ""))


_EFFECTS = {
    Effect.AT_ONCE: "The change takes effect at once, without a restart.",
    Effect.RESTART: "The job gets a new plan. Its pods write a checkpoint and stop, and new pods continue from it. If "
    "the plan and the pods are the same as before, they run on.",
    Effect.FIXED: "Until training has begun, as Restart. After that, the API server refuses the change.",
}


def _changes() -> Iterator[str]:
    """Yield the lines about changes of an existing job, from the table ``dljob.api.changes.CHANGES``."""
    yield from ("", "### Changes of an existing DLJob", "")
    yield from (f"- **{effect.value}:** {text}" for effect, text in _EFFECTS.items())
    yield from (
        "",
        "Training has begun if `status.lastCheckpoint` is set, or if `checkpoint.enabled` is true and "
        "`status.progress.step` is above 0. A job without checkpoints starts each plan from step 0, so all its fields "
        "may change. After a job has ended, nothing restarts it, and only `spec.runPolicy.ttlSecondsAfterFinished` may "
        "change. Labels, annotations and other metadata may always change.",
        "",
        "| Field | Effect of a change | Note |",
        "|---|---|---|",
    )
    yield from (f"| `spec.{c.path}` | {c.effect.value} | {c.note} |" for c in CHANGES)


def reference() -> str:
    """Return docs/reference/api.md: every field of every kind, from the CRDs."""
    lines = [f"<!-- {NOTE}. -->", "# API reference", ""]
    lines += ["This page is for authors of manifests and tools. It lists every field with type, default and limits;"]
    lines += ["`kubectl explain dljob.spec --recursive` shows the same."]
    lines += ["[The spec by example](../how-to/spec-by-example.md) shows how to write one.", ""]
    for definition in crd.definitions():
        version = definition["spec"]["versions"][0]
        root = version["schema"]["openAPIV3Schema"]
        kind = definition["spec"]["names"]["kind"]
        lines += [f"## {kind}", "", f"`{definition['spec']['group']}/{version['name']}`, "]
        lines[-1] += {"Namespaced": "namespaced", "Cluster": "one for the whole cluster"}[definition["spec"]["scope"]]
        lines[-1] += f", short name `{definition['spec']['names']['shortNames'][0]}`. {root['description']}"
        for rule in root.get("x-kubernetes-validations", ()):
            lines += [] if is_change_rule(rule) else ["", f"**Rule:** {rule['message']}."]
        for part in ("spec", "status"):
            schema = root["properties"][part]
            lines += ["", f"### {kind} {part}", ""]
            rules = [f"- {rule['message']}" for rule in schema.get("x-kubernetes-validations", ())]
            lines += ["Rules:", *dict.fromkeys(rules), ""] if rules else []
            lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|", *_rows(schema, part)]
            lines += _changes() if (kind, part) == ("DLJob", "spec") else []
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


_RBAC_PARTS = {
    "cluster": ("Cluster-wide", "A ClusterRole, in every installation: nodes and profiles belong to no namespace."),
    "allPods": (
        "Cluster-wide, if the operator counts the pods of all namespaces",
        "A ClusterRole, only with `operator.countAllPods` and `watchNamespaces` or `singleNamespaceInstall`.",
    ),
    "jobs": (
        "In the namespaces of jobs",
        "A ClusterRole, or with `watchNamespaces` or `singleNamespaceInstall` a Role in each of these namespaces.",
    ),
    "gangScheduling": (
        "In the namespaces of jobs, for gang scheduling",
        "In the same role, with the value of `gangScheduling` that the reason names. The default is `none`.",
    ),
    "provisioningRequests": (
        "In the namespaces of jobs, for ProvisioningRequests",
        "In the same role, only with `autoscaling.provisioningRequests.enabled`. The default is `false`.",
    ),
    "kueueCluster": (
        "Cluster-wide, with Kueue",
        "A ClusterRole, only with `kueue.enabled: true`, or `auto` if the cluster serves Kueue's API.",
    ),
    "kueueJobs": (
        "In the namespaces of jobs, with Kueue",
        "Only with Kueue: a ClusterRole, or with `watchNamespaces` or `singleNamespaceInstall` a Role in each of these "
        "namespaces.",
    ),
    "self": ("In the operator's namespace", "A Role in the release's namespace."),
    "trainer": (
        "Granted to the pods of a job",
        "A Role for each job, bound to the job's own ServiceAccount and limited to three ConfigMaps by name.",
    ),
    "look": (
        "Granted to the pod that looks at the data of a job with `spec.task`",
        "A Role for each such job, bound to a ServiceAccount of the pod and limited to one ConfigMap by name.",
    ),
}


def rbac() -> str:
    """Return docs/reference/permissions.md: the operator's permissions with reasons, from the chart's table."""
    table = yaml.safe_load((ROOT / RBAC).read_text())
    lines = [f"<!-- made by hack/generate from {RBAC}; change that, then run it again. -->", "# Permissions", ""]
    lines += [
        "This page is for cluster administrators. It lists every permission of the operator with its reason. The chart",
        "creates its roles from the same table, and no rule has a wildcard.",
        "",
        "Kubernetes' garbage collector deletes the objects of a deleted job (owner references), so the operator",
        "needs no permission for that.",
    ]
    for part, (title, text) in _RBAC_PARTS.items():
        lines += ["", f"## {title}", "", text, "", "| API group | Resources | Verbs | Reason |", "|---|---|---|---|"]
        for rule in table[part]:
            groups = ", ".join(group or "core" for group in rule["apiGroups"])
            named = f" ({', '.join(rule['resourceNames'])} only)" if "resourceNames" in rule else ""
            only = f" (only with {rule['feature']}.enabled)" if "feature" in rule else ""
            cells = [groups, ", ".join(rule["resources"]) + named, ", ".join(rule["verbs"]), rule["reason"] + only]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return docs/reference/metrics.md: every metric with its help text, from the metric registries of the code."""
    lines = [
        "<!-- made by hack/generate from operator/dljob/controller/metrics.py and "
        "trainer-image/dltrain/agent/metrics.py. -->"
    ]
    lines += ["# Metrics", ""]
    lines += ["This page is for operators of clusters. It lists every metric of the operator and of trainer pods."]
    lines += ["[Monitoring](../how-to/monitoring.md) says how to scrape them and which to watch first."]
    lines += ["", "The scrape configuration adds `namespace` and `pod` of the scraped pod and, for trainer pods,"]
    lines += ["`dljob`, the job's name. The label `job_namespace` is the namespace of the counted jobs."]
    for title, listed in (("The operator", metriclist.operator()), ("Each trainer pod", metriclist.trainer())):
        lines += ["", f"## {title}", "", "| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
        for metric in listed:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Return docs/reference/cli.md: every command of ``dljob`` with its options, from the argument parser."""
    return "<!-- made by hack/generate from operator/dljob/cli; change that, then run it again. -->\n" + cliref.page()


def outputs() -> dict[str, str]:
    """Return path from the repository's root → text, for every generated file."""
    files = {
        "docs/reference/api.md": reference(),
        "docs/reference/permissions.md": rbac(),
        "docs/reference/metrics.md": metrics(),
        "docs/reference/cli.md": command_line(),
        "docs/reference/modules.md": modulelist.page(),
        "docs/reference/constants.md": constantlist.page(),
        DASHBOARD: dashboard.dashboard(),
        OVERRIDE_POLICIES: definition_yaml(admission_policies()),
    }
    for definition in crd.definitions():
        name = f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml"
        for folder in ("crds", CHART_CRDS):
            files[f"{folder}/{name}"] = definition_yaml(definition)
    return files


def stale() -> list[str]:
    """Return a diff for each generated file that is not up to date.

    Also return a message for each other file in the two folders of CRDs, because no generator writes it.
    """
    wanted = outputs()
    found = []
    for path, text in wanted.items():
        file = ROOT / path
        old = file.read_text() if file.exists() else ""
        if old != text:
            diff = difflib.unified_diff(
                old.splitlines(), text.splitlines(), f"{path} (found)", f"{path} (expected)", lineterm=""
            )
            found.append("\n".join(diff))
    for folder in ("crds", CHART_CRDS):
        extra = {f"{folder}/{p.name}" for p in (ROOT / folder).glob("*")} - set(wanted)
        found += [f"{path}: nothing generates this file; remove it" for path in sorted(extra)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail with a diff when stale")
    if parser.parse_args().check:
        if found := stale():
            print(
                "\n".join(found),
                "\nThese files are stale. Run hack/generate and commit the files that it writes",
                sep="\n",
                file=sys.stderr,
            )
        return bool(found)
    for path, text in outputs().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
