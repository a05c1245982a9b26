"""Tests that node selectors match nodes as in the scheduler of Kubernetes, and of their texts."""

from typing import Any

import pytest

from dljob.cluster import Node
from dljob.cluster.domains import Domain
from dljob.cluster.node_selector import NodeSelector

Json = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
NODE = Node("n1", "cpu", labels={ZONE: "a", "disks": "4", "empty": "", "signed": "+7", "words": "four"})


def wants(key: str, operator: str, *values: str) -> Json:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


def selector(*terms: list[Json], fields: list[Json] | None = None) -> NodeSelector:
    """Return the selector of terms with these ``matchExpressions``, and another with ``matchFields`` if given."""
    found: list[Json] = [{"matchExpressions": term} for term in terms]
    return NodeSelector.parse({"nodeSelectorTerms": found + ([{"matchFields": fields}] if fields is not None else [])})


EXPRESSIONS: dict[str, tuple[Json, bool]] = {
    "In has the value": (wants(ZONE, "In", "b", "a"), True),
    "In has other values": (wants(ZONE, "In", "b"), False),
    "In without the label": (wants("rack", "In", "r1"), False),
    "In with the empty value": (wants("empty", "In", ""), True),
    "In without the label, empty value": (wants("rack", "In", ""), False),
    "NotIn has the value": (wants(ZONE, "NotIn", "a"), False),
    "NotIn has other values": (wants(ZONE, "NotIn", "b"), True),
    "NotIn without the label": (wants("rack", "NotIn", "r1"), True),
    "Exists": (wants(ZONE, "Exists"), True),
    "Exists without the label": (wants("rack", "Exists"), False),
    "DoesNotExist": (wants(ZONE, "DoesNotExist"), False),
    "DoesNotExist without the label": (wants("rack", "DoesNotExist"), True),
    "Gt above": (wants("disks", "Gt", "3"), True),
    "Gt equal": (wants("disks", "Gt", "4"), False),
    "Gt compares numbers, not texts": (wants("disks", "Gt", "30"), False),
    "Gt without the label": (wants("rack", "Gt", "-1"), False),
    "Gt of a word": (wants("words", "Gt", "3"), False),
    "Gt of a number with a sign": (wants("signed", "Gt", "-3"), True),
    "Gt of two values": (wants("disks", "Gt", "1", "2"), False),
    "Gt of no number": (wants("disks", "Gt", "1_0"), False),
    "Gt of a number beyond 64 bits": (wants("disks", "Gt", "-9223372036854775809"), False),
    "Lt below": (wants("disks", "Lt", "5"), True),
    "Lt equal": (wants("disks", "Lt", "4"), False),
    "an operator that does not exist": (wants(ZONE, "Like", "a"), False),
}


@pytest.mark.parametrize(("expression", "matches"), EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_expression(expression: Json, matches: bool) -> None:
    assert selector([expression]).matches(NODE) is matches


FIELDS: dict[str, tuple[list[Json], bool]] = {
    "the name": ([wants("metadata.name", "In", "n1")], True),
    "another name": ([wants("metadata.name", "In", "n2")], False),
    "not the name": ([wants("metadata.name", "NotIn", "n1")], False),
    "not another name": ([wants("metadata.name", "NotIn", "n2")], True),
    "two names in one expression, which Kubernetes refuses": ([wants("metadata.name", "In", "n1", "n2")], False),
    "another field": ([wants("spec.unschedulable", "In", "false")], False),
    "another operator": ([wants("metadata.name", "Exists")], False),
    "no field": ([], False),
}


@pytest.mark.parametrize(("fields", "matches"), FIELDS.values(), ids=FIELDS.keys())
def test_field(fields: list[Json], matches: bool) -> None:
    assert selector(fields=fields).matches(NODE) is matches


TERMS: dict[str, tuple[list[list[Json]], bool]] = {
    "no terms": ([], False),
    "an empty term": ([[]], False),
    "all expressions of a term": ([[wants(ZONE, "In", "a"), wants("disks", "Exists")]], True),
    "one of two expressions": ([[wants(ZONE, "In", "a"), wants("rack", "Exists")]], False),
    "one of two terms": ([[wants(ZONE, "In", "b")], [wants(ZONE, "In", "a")]], True),
    "one of two terms, the other is empty": ([[], [wants(ZONE, "In", "a")]], True),
    "one of two terms, the other has an unknown operator": ([[wants(ZONE, "Like")], [wants(ZONE, "In", "a")]], True),
    "none of two terms": ([[wants(ZONE, "In", "b")], [wants(ZONE, "In", "c")]], False),
}


@pytest.mark.parametrize(("terms", "matches"), TERMS.values(), ids=TERMS.keys())
def test_terms(terms: list[list[Json]], matches: bool) -> None:
    assert selector(*terms).matches(NODE) is matches


def test_term_needs_its_labels_and_its_fields() -> None:
    term = {"matchExpressions": [wants(ZONE, "In", "a")], "matchFields": [wants("metadata.name", "In", "n2")]}
    assert not NodeSelector.parse({"nodeSelectorTerms": [term]}).matches(NODE)


EBS = "topology.ebs.csi.aws.com/zone"
NEW: dict[str, tuple[Json, bool]] = {
    "a label that the template lacks": (wants("rack", "In", "r1"), True),
    "a label that the template lacks, and that must exist": (wants("rack", "Exists"), True),
    "a label of the template": (wants(ZONE, "In", "b"), False),
    "the zone by the name of a driver": (wants(EBS, "In", "a"), True),
    "another zone by the name of a driver": (wants(EBS, "In", "b"), False),
    "the name of a node that exists": (wants("kubernetes.io/hostname", "In", "n7"), False),
    "an operator that does not exist": (wants("rack", "Like", "r1"), False),
}


@pytest.mark.parametrize(("expression", "matches"), NEW.values(), ids=NEW.keys())
def test_node_that_an_autoscaler_can_add(expression: Json, matches: bool) -> None:
    """A template names few labels. A volume of a node that exists is never on a new node."""
    new = Node("new", "cpu", labels={ZONE: "a"}, exists=False)
    assert selector([expression]).matches(new) is matches


def test_zone_of_a_template_without_zone_is_unknown() -> None:
    assert selector([wants(EBS, "In", "a")]).matches(Node("new", "cpu", exists=False))


def test_allowed_topologies() -> None:
    body = [{"matchLabelExpressions": [{"key": ZONE, "values": ["a", "b"]}, {"key": "disks", "values": ["4"]}]}]
    found = NodeSelector.parse_topologies(body)
    assert found.matches(NODE) and not found.matches(Node("n2", "cpu", labels={ZONE: "b"}))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (selector([wants(ZONE, "In", "a", "b")]), f"{ZONE} in (a, b)"),
        (selector([wants("k", "In", *"abcde")]), "k in (a, b, c, 2 more)"),
        (selector([wants("k", "NotIn", "a"), wants("l", "Exists")]), "k not in (a) and the label l"),
        (selector([wants("k", "Gt", "3")], [wants("l", "DoesNotExist")]), "k > 3 or no label l"),
        (selector(fields=[wants("metadata.name", "In", "n1")]), "metadata.name in (n1)"),
        (selector(), "no node"),
    ],
)
def test_text(found: NodeSelector, text: str) -> None:
    assert str(found) == text


REQUIREMENTS: dict[str, tuple[NodeSelector, bool]] = {
    "labels": (selector([wants(ZONE, "In", "a"), wants("rack", "NotIn", "r")], [wants("k", "In", "v")]), True),
    "another operator": (selector([wants(ZONE, "In", "a"), wants("disks", "Gt", "3")]), False),
    "one of two terms has another operator": (selector([wants(ZONE, "In", "a")], [wants("l", "Exists")]), False),
    "fields": (selector(fields=[wants("metadata.name", "In", "n1")]), False),
    "a value that no label has": (selector([wants(ZONE, "In", "a" * 64)]), False),
    "no terms": (selector(), False),
}


@pytest.mark.parametrize(("found", "has"), REQUIREMENTS.values(), ids=REQUIREMENTS.keys())
def test_requirements_choose_the_same_nodes(found: NodeSelector, has: bool) -> None:
    terms = found.requirements()
    assert (terms is not None) is has
    if terms is not None:
        others = [Node("x", "cpu", labels=labels) for labels in ({}, {ZONE: "a", "rack": "r"}, {"k": "v"}, {ZONE: "b"})]
        assert all(Domain(terms=terms).has(node) == found.matches(node) for node in (NODE, *others))
