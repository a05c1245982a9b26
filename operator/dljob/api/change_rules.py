"""CEL transition rules of the CRD, which refuse a change of a spec that the table ``changes.CHANGES`` does not allow.

API servers evaluate rules with ``oldSelf`` only for updates. The rules compare the old and the new spec. They therefore
never refuse a write of the status, and never refuse an unchanged spec, whatever the spec contains.
"""

import re
from collections.abc import Mapping
from typing import Any

from dljob.api.base import INT_OR_STRING
from dljob.api.changes import AS_BEGUN, BATCH_OUT_OF_RANGE, CHANGE_REFUSED, ENDED, FIXED, Change, Compared, ended_paths

Schema = Mapping[str, Any]
_STATUS, _CHECKPOINT = "oldSelf.status", "oldSelf.spec.checkpoint"
HAS_ENDED = f"has({_STATUS}) && has({_STATUS}.completionTime)"
HAS_BEGUN = (
    f"has({_STATUS}) && (has({_STATUS}.lastCheckpoint) || "
    f"(!has({_CHECKPOINT}) || !has({_CHECKPOINT}.enabled) || {_CHECKPOINT}.enabled) && "
    f"has({_STATUS}.progress) && {_STATUS}.progress.step > 0)"
)
_REFUSED_BEFORE = (
    f"has({_STATUS}) && has({_STATUS}.conditions) && {_STATUS}.conditions.exists(c, "
    f"c.type == 'Accepted' && c.status == 'False' && c.reason == '{CHANGE_REFUSED}')"
)
"""CEL condition: the old spec contains a change that the operator has refused. An update may then set fields back."""
_MAY_CHANGE = f"{HAS_ENDED} || !({HAS_BEGUN}) || {_REFUSED_BEFORE}"
"""CEL condition: the rules about fixed fields do not hold for the job. ``_ended`` is about those that have ended."""
_SINCE = ", as when training began. "
"""The beginning of ``AS_BEGUN``."""

_PLAN, _RANGE = f"{_STATUS}.plan", "self.spec.batchSizeRange"
_BATCH = f"{_PLAN}.batchChoice.globalBatchSize"
_BATCH_RANGE = {
    "rule": f"(has({_RANGE}) ? has(oldSelf.spec.batchSizeRange) && {_RANGE} == oldSelf.spec.batchSizeRange : "
    f"!has(oldSelf.spec.batchSizeRange)) || {HAS_ENDED} || !({HAS_BEGUN}) || !has({_PLAN}) || "
    f"!has({_PLAN}.batchChoice) || (has({_RANGE}) ? (has({_RANGE}.min) ? {_RANGE}.min : self.spec.globalBatchSize) <= "
    f"{_BATCH} && {_BATCH} <= {_RANGE}.max : self.spec.globalBatchSize == {_BATCH})",
    "message": f"{BATCH_OUT_OF_RANGE}status.plan.batchChoice.globalBatchSize{AS_BEGUN}",
}
"""Rule about a change of ``batchSizeRange`` after training has begun.

The new range must contain the global batch size that the operator has chosen. If the range is removed,
``globalBatchSize`` must equal the chosen size.
"""


def change_rules(spec: Schema) -> list[dict[str, str]]:
    """Return the CEL rules that refuse changes of a DLJob, as items of ``x-kubernetes-validations`` at the CRD's root.

    ``spec``: the structural schema of the spec, which shows which fields are required and have defaults.

    The API server evaluates all rules with each write of a status: with a rule for each field, a write took it 16.5 ms,
    and with one rule for all fields 14.4 ms. Its ``messageExpression`` (Kubernetes 1.29 and later) names those that
    differ, with the new and the former value.

    The expressions use ``format`` instead of ``join`` and instead of concatenation of numbers. The API server estimates
    the cost of an expression from the length of its texts, and assumes no upper limit for a number as text. It would
    therefore reject the CRD. The length of a result of ``format`` does not matter.
    """
    return [_fixed(spec), _BATCH_RANGE, _ended(spec)]


def is_change_rule(rule: Mapping[str, str]) -> bool:
    """Return True if a CEL rule is about a change: it compares the object (``self``) with its earlier state."""
    return "oldSelf" in rule["rule"]


def _fixed(spec: Schema) -> dict[str, str]:
    same = {change: _same(change, spec) for change in FIXED}
    found = [f"({equal}) ? '' : {_found(change, spec)}" for change, equal in same.items()]
    return {
        "rule": f"{_MAY_CHANGE} || {' && '.join(f'({equal})' for equal in same.values())}",
        "message": f"spec: found other values in fixed fields; expected the former ones{AS_BEGUN}",
        "messageExpression": _one_after_another(found, AS_BEGUN.removeprefix(_SINCE)),
    }


def _found(change: Change, spec: Schema) -> str:
    """Return a CEL expression that gives the new and the former value of a fixed field as text."""
    field = f"spec.{change.path}"
    if change.compared is not Compared.PRESENCE and _type(change.path, spec) in ("integer", "number", INT_OR_STRING):
        text = _number(change.path, spec)
        return f"'{field}: found %s; expected %s{_SINCE}'.format([{text}, {_old(text)}])"
    text = _text(change.path, spec)
    if change.compared is Compared.PRESENCE:
        text = f"({_present(change.path, spec)} ? 'a value' : 'no value')"
    return f"'{field}: found ' + {text} + '; expected ' + {_old(text)} + '{_SINCE}'"


def _same(change: Change, spec: Schema) -> str:
    """Return the CEL condition that a change leaves the field as it is, or changes it in a way that is allowed."""
    value = _value(change.path, spec)
    if change.compared is Compared.PRESENCE:
        value = _present(change.path, spec)
    same = f"{value} == {_old(value)}"
    if _type(change.path, spec) == INT_OR_STRING:
        # The SDK writes the text of an integer that a manifest may contain. The API server would refuse the rule if it
        # compared two types, or two texts of numbers, whose lengths it does not know.
        old = _old(value)
        same = (
            f"type({value}) == int ? (type({old}) == int ? {same} : string({value}) == {old}) : "
            f"(type({old}) == int ? {value} == string({old}) : {same})"
        )
    return f"{same} || {value} == '' || {_old(value)} == ''" if change.compared is Compared.SET_VALUE else same


def _present(path: str, spec: Schema) -> str:
    return f"({_has(path, spec)} && size(self.spec.{path}) > 0)"


def _ended(spec: Schema) -> dict[str, str]:
    same = {path: _unchanged(path, spec) for path in ended_paths(tuple(spec["properties"]))}
    found, _, expected = ENDED.partition("expected")
    changed = [f"{equal} ? '' : 'spec.{path}{found}'" for path, equal in same.items()]
    return {
        # The comparison of whole sections comes last: writes of the status of a job that trains need not make it.
        "rule": f"!({HAS_ENDED}) || {' && '.join(same.values())}",
        "message": f"spec{ENDED}",
        "messageExpression": _one_after_another(changed, f"expected{expected}"),
    }


def _unchanged(path: str, spec: Schema) -> str:
    field, is_set = f"self.spec.{path}", _has(path, spec)
    same = f"{field} == {_old(field)}"
    return f"({is_set} ? {_old(is_set)} && {same} : !({_old(is_set)}))" if is_set else f"({same})"


def _one_after_another(texts: list[str], end: str) -> str:
    """Return a CEL expression that gives the values of the expressions ``texts`` and the text ``end``."""
    return f"'{'%s' * len(texts)}{end}'.format([{', '.join(texts)}])"


def _old(expression: str) -> str:
    """Turn a CEL expression about the changed object (``self``) into one about the earlier object (``oldSelf``)."""
    return re.sub(r"\bself\.", "oldSelf.", expression)


def _value(path: str, spec: Schema) -> str:
    """Return a CEL expression that gives the value of a field, for a comparison, or its default if it is unset.

    An unset field without a default has the value false, empty text or 0, depending on its type. Set fields never have
    the values empty text and 0, because their bounds exclude these. ``path``: path of the field in the spec.
    """
    kind, is_set = _type(path, spec), _has(path, spec)
    unset = _schema(path, spec).get("default", {"string": "", INT_OR_STRING: "", "boolean": False}.get(kind, 0))
    return f"({is_set} ? self.spec.{path} : {_literal(unset)})" if is_set else f"self.spec.{path}"


def _text(path: str, spec: Schema) -> str:
    """Return a CEL expression that formats the value of a string or boolean field as text, for a message.

    If the field is unset, the expression gives its default, or 'no value' if it has none.
    """
    schema, field, is_set = _schema(path, spec), f"self.spec.{path}", _has(path, spec)
    text = f"({field} ? 'true' : 'false')" if schema["type"] == "boolean" else field
    unset = str(_literal(schema["default"])).strip("'") if "default" in schema else "no value"
    return f"({is_set} ? {text} : '{unset}')" if is_set else text


def _number(path: str, spec: Schema) -> str:
    """Return a CEL expression that gives the value of a number or a quantity, for a message; its default if unset.

    If it is unset and has no default, the expression gives the text 'no value'.
    """
    schema, field, is_set = _schema(path, spec), f"self.spec.{path}", _has(path, spec)
    unset = _literal(schema.get("default", "no value"))
    return f"({is_set} ? dyn({field}) : dyn({unset}))" if is_set else f"dyn({field})"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)


def _schema(path: str, spec: Schema) -> Schema:
    found = spec
    for name in path.split("."):
        found = found["properties"][name]
    return found


def _type(path: str, spec: Schema) -> str:
    """Return the type of a field of the spec. That of a field with an integer or a text is ``INT_OR_STRING``."""
    schema = _schema(path, spec)
    return INT_OR_STRING if schema.get(INT_OR_STRING) else str(schema["type"])


def _has(path: str, spec: Schema) -> str:
    """Return the CEL condition that a field, and all sections that contain it, are set.

    ``path``: path of the field in the spec, such as optimizer.name. Return an empty text if the field and all its
    sections are required, so that they are always set.
    """
    names, found, parts = path.split("."), spec, []
    for n, name in enumerate(names, 1):
        if name not in found.get("required", ()):
            parts.append(f"has(self.spec.{'.'.join(names[:n])})")
        found = found["properties"][name]
    return " && ".join(parts)
