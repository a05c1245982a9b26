"""Bounds on a DLJob's size and nesting, which are checked before the operator decodes the object.

Anybody who may create a DLJob can store 1.5 MB of JSON with thousands of levels. The decoder raises RecursionError at
about a thousand levels, and dense JSON needs twenty times its size as Python objects. An object beyond the bounds is
replaced by a substitute without the spec. The substitute contains a message about the problem, and the job's condition
Accepted shows this message.
"""

import json
import re
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from pydantic_core import from_json

Json = dict[str, Any]

MAX_SPEC_NBYTES = 64 * 2**10
MAX_SPEC_DEPTH = 32
"""Maximum number of nested levels of maps and lists in a spec. The deepest field of a pod template has about 12."""
MAX_OBJECT_NBYTES = 512 * 2**10
"""Maximum size of a whole DLJob in bytes.

It contains the spec, the status, and a copy of the spec in the annotation of ``kubectl apply``.
"""
MAX_REPORT_NBYTES = 512 * 2**10
"""Maximum size of a job's report in bytes. The report of a job with 1,000 ranks has about 300 KiB."""
PROBLEM = "dljob.dev/problem"
"""Key that ``_replaced`` adds to an object. Its value says why the object is too large or too deeply nested."""

_SAFE_BRACKETS = 400
"""An object with fewer opening brackets than this cannot be nested too deeply for the decoder, and is not measured."""
_SAFE_LIST_NBYTES = 4 * 2**20
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
EXPECTED = f"expected a spec of at most {MAX_SPEC_NBYTES} bytes and {MAX_SPEC_DEPTH} levels of maps and lists"
REMEDY = "Put long texts into a ConfigMap or into the image"


def loads(text: bytes) -> Any:
    """Decode JSON like ``json.loads``, in two thirds of its time, and with one copy of each short text.

    The faster decoder refuses some texts that ``json.loads`` reads, such as those with more than 200 levels.
    """
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def spec_problem(spec: Mapping[str, Any]) -> str | None:
    """Return a message if a decoded spec is too large or too deeply nested; None if it is not."""
    depth = _depth(spec)
    if depth > MAX_SPEC_DEPTH:
        return f"spec: found {depth} levels of maps and lists; {EXPECTED}. {REMEDY}"
    nbytes = len(json.dumps(spec, separators=(",", ":"), ensure_ascii=False).encode())
    return f"spec: found {nbytes} bytes; {EXPECTED}. {REMEDY}" if nbytes > MAX_SPEC_NBYTES else None


def report_problem(text: str) -> str | None:
    """Return a message if the text of a job's report is too long; None if it is not."""
    if len(text) <= MAX_REPORT_NBYTES:
        return None
    return f"report: found {len(text)} bytes; expected at most {MAX_REPORT_NBYTES}"


def _depth(value: Any) -> int:
    """Return the number of nested levels of maps and lists in a value. The function does not use recursion itself."""
    depth, level = 0, [value]
    while level:
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(item, Mapping | list)
        ]
        depth += 1
    return depth


def number_of_values(spec: Mapping[str, Any]) -> int:
    """Return the number of maps, lists, keys and other values in a spec, by which its memory can be estimated."""
    number = 0
    level: list[Any] = [spec]
    while level:
        number += sum(2 * len(parent) if isinstance(parent, Mapping) else len(parent) for parent in level)
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(item, Mapping | list)
        ]
    return number


def bounded_event(line: bytes, max_nbytes: float = MAX_OBJECT_NBYTES) -> bytes:
    """Return a line of a watch, ``{"type": …, "object": …}``, as JSON that is safe to decode.

    If the object is too large (more than ``max_nbytes``) or too deeply nested, the line contains a substitute without
    the spec, see ``_replaced``. Otherwise, return the line unchanged.
    """
    problem = _problem(line, max_nbytes)
    if problem is None:
        return line
    parts = {key: line[begin:end] for key, begin, end in _members(line)}
    event = {"type": loads(parts["type"]), "object": _replaced(parts["object"], problem)}
    return json.dumps(event).encode()


def bounded_list(text: bytes, max_nbytes: float = MAX_OBJECT_NBYTES) -> Json:
    """Decode a list of DLJobs from the API server.

    If the list has at most 4 MiB and the decoder can read it, decode it as a whole and replace nothing. Otherwise,
    decode its items one by one. In this case, replace each item that is too large (more than ``max_nbytes``), too
    deeply nested or has a spec beyond the bounds by a substitute without its spec, see ``_replaced``. Leave out
    ``metadata.managedFields``, which nobody reads. Otherwise, 50 DLJobs would take 600 MB at the same time.
    """
    if len(text) <= _SAFE_LIST_NBYTES:
        try:
            found: Json = loads(text)
        except RecursionError:
            pass
        else:
            return found
    result: Json = {}
    for key, begin, end in _members(text):
        value = text[begin:end]
        items = key == "items"
        result[key] = [_item(item, max_nbytes) for item in _elements(value)] if items else loads(value)
    return result


def bounded_answer(text: bytes) -> Any:
    """Decode an answer of the API server about DLJobs: an object, a list or an error. Raise ValueError for other text.

    A DLJob that is too large or too deeply nested is replaced by a substitute without its spec, see ``_replaced``. For
    a DLJob in a list, see ``bounded_list``.
    """
    if len(text) <= _SAFE_LIST_NBYTES and _problem(text, MAX_OBJECT_NBYTES) is None:
        return loads(text)
    return _by_parts(text, MAX_OBJECT_NBYTES)


def decoded_answer(text: bytes) -> Any:
    """Decode an answer of the API server about objects of any kind except DLJob.

    Their size is not limited. An object that is nested too deeply for the JSON decoder, such as one with a user's
    ``managedFields``, is replaced by a substitute without its spec, see ``_replaced``. Raise ValueError if the text is
    not JSON.
    """
    try:
        return loads(text)
    except RecursionError:
        return _by_parts(text, inf)


def decoded_event(line: bytes) -> Json:
    """Decode a line of a watch of another kind than DLJob. The size of its object is not limited.

    An object that is nested too deeply for the JSON decoder is replaced by a substitute without its spec.
    """
    try:
        found: Json = loads(line)
    except RecursionError:
        found = loads(bounded_event(line, inf))
    return found


def _by_parts(text: bytes, max_nbytes: float) -> Json:
    if any(key == "items" for key, _, _ in _members(text)):
        return bounded_list(text, max_nbytes)
    return _item(text, max_nbytes)


def _item(text: bytes, max_nbytes: float) -> Json:
    problem = _problem(text, max_nbytes)
    if problem is not None:
        return _replaced(text, problem)
    found: Json = loads(text)
    if max_nbytes < inf:
        found["metadata"].pop("managedFields", None)
        problem = spec_problem(found.get("spec") or {})
    return found if problem is None else _replaced(text, problem)


def _problem(text: bytes, max_nbytes: float) -> str | None:
    if len(text) > max_nbytes:
        return f"spec: found an object of {len(text)} bytes; {EXPECTED}. {REMEDY}"
    if text.count(b"{") + text.count(b"[") < _SAFE_BRACKETS:
        return None
    depth = _text_depth(text)
    if depth > 2 * MAX_SPEC_DEPTH:
        return f"spec: found {depth} levels of maps and lists; {EXPECTED}. {REMEDY}"
    return None


def _text_depth(text: bytes) -> int:
    depth = deepest = 0
    for token in _TOKEN.finditer(text):
        character = text[token.start()]
        if character in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in b"}]":
            depth -= 1
    return deepest


def _replaced(text: bytes, problem: str) -> Json:
    """Return a substitute for an object that is too large or too deeply nested.

    It contains the metadata that identifies the object, an empty spec, and ``problem`` (a message) under the key
    ``PROBLEM``. It also contains the object's status, unless the status is itself too large or too deeply nested.
    """
    parts = {key: (begin, end) for key, begin, end in _members(text)}
    found: Json = {PROBLEM: problem, "spec": {}}
    for key in ("apiVersion", "kind"):
        if key in parts:
            found[key] = loads(text[slice(*parts[key])])
    meta = text[slice(*parts["metadata"])]
    # Annotations are left out: an object beyond the bounds starts nothing.
    found["metadata"] = {key: loads(meta[begin:end]) for key, begin, end in _members(meta) if key in _IDENTITY}
    status = text[slice(*parts["status"])] if "status" in parts else b"{}"
    if _problem(status, MAX_OBJECT_NBYTES) is None:
        found["status"] = loads(status)
    return found


def _members(text: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield (key, begin, end) for each top-level member of a JSON object, without decoding the values.

    ``text[begin:end]`` is the text of the member's value.
    """
    depth, key, begin = 0, None, 0
    for token in _TOKEN.finditer(text):
        character = text[token.start()]
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
            if depth == 0:
                if key is not None:
                    yield key, begin, token.start()
                return
        elif character in b",":
            if depth == 1 and key is not None:
                yield key, begin, token.start()
                key = None
        elif depth == 1 and key is None:
            key, begin = str(loads(token.group())), text.index(b":", token.end()) + 1


def _elements(text: bytes) -> Iterator[bytes]:
    """Yield the text of each element of a JSON array of objects."""
    depth, begin = 0, 0
    for token in _TOKEN.finditer(text):
        character = text[token.start()]
        if character in b"{[":
            depth += 1
            if depth == 2:
                begin = token.start()
        elif character in b"}]":
            depth -= 1
            if depth == 1:
                yield text[begin : token.end()]
            elif depth == 0:
                return
