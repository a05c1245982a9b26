"""Tests that the table of permissions is what the operator's code calls: nothing is missing and nothing is left over."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

import dljob
from dljob.controller.watches import WATCHED
from dljob.kube import kinds
from dljob.kube.kinds import APPLIED, Kind
from support.manifests.helm_chart import CHART

Permission = tuple[str, str, str]
"""API group, resource and verb."""

VERBS = {
    "get": ("get",), "metadata_of": ("get",), "find": ("list",), "page": ("list",), "uids": ("list",),
    "metadata": ("list",), "watch": ("watch",),
    "create": ("create",), "replace": ("update",), "apply": ("create", "patch"), "merge": ("patch",),
    "delete": ("delete",),
}  # fmt: skip
"""Method of ``dljob.kube.Api`` → the verbs that it needs. Server-side apply needs both, because it may create."""
_FLAVORS = (
    Kind("kueue.x-k8s.io/v1beta1", "ResourceFlavor", "resourceflavors", namespaced=False),
    Kind("kueue.x-k8s.io/v1beta1", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False),
    kinds.PRIORITY_CLASS,
)
VARIABLE: dict[tuple[str, str], Iterable[Kind]] = {
    # (module, method): the kinds of a call whose kind is not a constant
    ("kube/applying/applier.py", "get"): APPLIED.values(),
    ("kube/applying/applier.py", "apply"): APPLIED.values(),
    ("kube/applying/looks.py", "metadata_of"): APPLIED.values(),
    ("kube/applying/looks.py", "metadata"): APPLIED.values(),
    ("kube/client.py", "delete"): (kinds.STATEFUL_SET, kinds.POD, kinds.PROVISIONING_REQUEST),
    ("kube/client.py", "get"): (kinds.DLJOB, kinds.CONFIG_MAP),
    ("kube/client.py", "metadata_of"): (kinds.SECRET,),
    ("kube/client.py", "uids"): WATCHED,
    ("kube/watch/reflector.py", "page"): (*WATCHED, kinds.WORKLOAD, kinds.PROVISIONING_REQUEST),
    ("kube/watch/reflector.py", "watch"): (*WATCHED, kinds.WORKLOAD, kinds.PROVISIONING_REQUEST),
    ("app/main.py", "page"): (kinds.DLJOB, kinds.PROFILE),
    ("controller/watches/rereading.py", "get"): (kinds.DLJOB, kinds.CONFIG_MAP),
    ("controller/queues.py", "page"): (kinds.WORKLOAD,),
    ("controller/queues.py", "get"): _FLAVORS,
    ("controller/queues.py", "apply"): (kinds.WORKLOAD,),
    ("controller/queues.py", "merge"): (kinds.WORKLOAD,),
    ("controller/queues.py", "delete"): (kinds.WORKLOAD,),
}
OF_USERS = ("cli/", "client/", "sdk/")
"""Packages that run with the permissions of their user."""


def calls() -> Iterator[tuple[str, str, Kind | None, str]]:
    """Yield module, method, kind and subresource of each call of ``Api`` in the operator's source.

    The kind is None if it is not a constant of ``dljob.kube.kinds``.
    """
    root = Path(dljob.__file__).parent
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).as_posix()
        if module.startswith(OF_USERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in VERBS and owner in ("api", "self.api", "self._api"):
                given = {keyword.arg: ast.unparse(keyword.value).strip("'") for keyword in node.keywords}
                kind = getattr(kinds, ast.unparse(node.args[0]).removeprefix("kinds."), None)
                yield module, node.func.attr, kind, given.get("subresource", "")


def needed() -> set[Permission]:
    return {
        (each.api_version.rpartition("/")[0], each.plural + (f"/{subresource}" if subresource else ""), verb)
        for module, method, kind, subresource in calls()
        for each in ([kind] if kind is not None else VARIABLE[module, method])
        for verb in VERBS[method]
    }


def granted() -> tuple[set[Permission], set[Permission]]:
    """Return the operator's permissions, and those that it grants to the pods of jobs."""
    table = yaml.safe_load((CHART / "files/rbac.yaml").read_text())
    found: dict[bool, set[Permission]] = {True: set(), False: set()}
    for part, rules in table.items():
        for rule in rules:
            found[part in ("trainer", "look")] |= {
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return found[False], found[True]


def test_kinds_of_all_calls_are_known() -> None:
    """A new call with a variable kind needs a row in ``VARIABLE``."""
    assert {(module, method) for module, method, kind, _ in calls() if kind is None} == VARIABLE.keys()


def test_operator_may_do_all_that_it_does() -> None:
    assert needed() - granted()[0] == set()


def test_operator_may_do_nothing_else() -> None:
    """An API server rejects a Role with more permissions than its creator has."""
    own, passed_on = granted()
    assert own - needed() == passed_on - needed()
