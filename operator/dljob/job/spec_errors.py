"""Messages for validation errors of a spec. They name the field, the value and what is expected."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dljob.api.base import PATTERNS
from dljob.api.field_names import similar_fields

REFERENCE = "kubectl explain dljob.spec"
"""Where users find the known fields of a spec."""
_PROBLEM = re.compile(r"(?P<field>[\w./\[\]-]+): found (?P<found>.*?); expected (?P<expected>.*)", re.DOTALL)
_UNEXPECTED = re.compile(r"(?P<field>[\w.\[\]-]+): found (?P<found>[^;]*)(; (?P<expected>.*))?", re.DOTALL)
_RULE = re.compile(r"(?P<field>[\w.\[\]-]+)(?P<expected>.*) \(found (?P<found>.*)\)", re.DOTALL)
_OF_SERVER = re.compile(
    r"(?P<field>[\w.\[\]-]+): (?:Invalid|Unsupported) value: (?P<found>\S+?): (?P<expected>.*)", re.DOTALL
)


@dataclass(frozen=True)
class Problem:
    """One reason why a spec is invalid."""

    message: str
    field: str = ""
    """Path of the field, such as ``spec.nodes.min``. Empty if the message names none."""
    found: str = ""
    expected: str = ""

    @classmethod
    def of(cls, message: str) -> Self:
        """Return the problem that a message describes, in the form of dljob or of the API server."""
        for form in (_OF_SERVER, _PROBLEM, _UNEXPECTED, _RULE):
            if match := form.fullmatch(message):
                parts = {name: (text or "").strip() for name, text in match.groupdict().items()}
                return cls(message, **parts)
        return cls(message)

    def __str__(self) -> str:
        return self.message


class InvalidSpecError(ValueError):
    """A manifest whose spec is invalid. The text joins the messages of all problems with semicolons."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def problems_of(error: ValidationError, root: str = "spec", types: Collection[str] = ()) -> tuple[Problem, ...]:
    """Return the errors of a spec, with the messages of ``in_words``. ``types``: those of pydantic; empty: all."""
    wanted = (item for item in error.errors() if not types or item["type"] in types)
    return tuple(Problem.of(_in_words(item, root, REFERENCE)) for item in wanted)


def in_words(error: ValidationError, root: str = "spec", reference: str = REFERENCE) -> str:
    """Describe all errors of a spec, such as ``spec.nodes.min: found 0; expected …``, separated by semicolons.

    ``root``: name of the validated document. ``reference``: where users find its known fields.
    """
    return "; ".join(_in_words(item, root, reference) for item in error.errors())


def _in_words(error: ErrorDetails, root: str, reference: str) -> str:
    where = ".".join([root, *(str(part) for part in error["loc"])])
    if error["type"] == "value_error":  # a rule, which names its own field
        rule = error["msg"].removeprefix("Value error, ")
        if rule.startswith("found "):  # a validator of one field, whose message is complete
            return f"{where}: {rule}"
        return f"{where}.{rule}{_found(rule, error['input'])}"
    if error["type"] == "missing":
        return f"{where}: found nothing; expected a value. Add it"
    if error["type"] == "extra_forbidden":
        similar = similar_fields(where) if root == "spec" else ()
        known = f"expected {' or '.join(similar)}, if that is meant: rename or " if similar else ""
        return f"{where}: found an unknown field; {known}remove it, or see {reference} for the known fields"
    return f"{where}: found {error['input']!r:.200}; expected {_expected(error)}"


def _expected(error: ErrorDetails) -> str:
    """Return the words that follow "expected" in the message for a validation error."""
    if meaning := PATTERNS.get(str(error.get("ctx", {}).get("pattern"))):
        return meaning
    if text := _of_type(error):
        return text
    message = error["msg"]
    if (rest := message.removeprefix("Input should be ")) != message:
        return f"a number {rest}" if rest.startswith(("greater", "less")) else rest
    return f"a valid value: {message[:1].lower()}{message[1:]}"


_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
_MAPPINGS = {
    "ModelSpec": "{{name: {}}}",
    "Dataset": "{{name: {}}}",
    "NodeRange": "{{min: {0}, max: {0}}}",
    "Planning": "{{mode: {}}}",
}
"""Class of a section of the spec → how to write the one value that users put in its place."""


def _of_type(error: ErrorDetails) -> str:
    """Return what is expected in place of a value of another type, with an example; empty for other errors."""
    found = error["input"]
    plain = isinstance(found, str | int | float) and not isinstance(found, bool)
    match error["type"]:
        case "string_type" if isinstance(found, Mapping) and found.keys() == {"name"}:
            return f"the name as text. Write the name alone: {found['name']}"
        case "string_type":
            return f'text. Put the value in quotes: "{found}"' if plain else "text"
        case "tuple_type" | "list_type":
            if isinstance(found, Mapping):
                pairs = [f"{{name: {name}, value: {value}}}" for name, value in found.items()][:1]
                return f"a list, such as {pairs}".replace("'", "") if error["loc"][-1:] == ("env",) else "a list"
            return f"a list, such as [{', '.join(str(found).split())}]" if plain else "a list"
        case "model_type" | "model_attributes_type" | "dict_type":
            example = _MAPPINGS.get(str(error.get("ctx", {}).get("class_name")))
            return f"a mapping, such as {example.format(found)}" if example and plain else "a mapping of its fields"
        case "int_type" | "float_type" if isinstance(found, str) and _NUMBER.fullmatch(found):
            return "a number without quotes"
        case "bool_type" | "bool_parsing":
            return "true or false"
    return ""


def _found(rule: str, given: object) -> str:
    """Return a text in brackets with the values of the fields that the message of a broken rule mentions.

    ``rule``: the message. ``given``: the section of the document to which the rule applies.
    """
    found = {name: _at(given, name) for name in re.findall(r"[A-Za-z][A-Za-z.]*[A-Za-z]", rule)}
    known = [name for name, value in found.items() if value is not None]
    inner = [name for name in known if not any(other.startswith(f"{name}.") for other in known)]
    texts = [f"{name}: {json.dumps(found[name], default=str):.100}" for name in inner]
    return f" (found {', '.join(texts)})" if texts else " (found none of these fields)"


def _at(given: object, path: str) -> object:
    for name in path.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    return given
