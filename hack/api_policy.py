"""Compare the CRDs with those of the last release: v1alpha1 changes only additively.

A stored job must stay valid, keep all its fields, and mean the same. Allowed are new optional fields, new enum values,
wider bounds, integers beside texts, other descriptions, rules that refuse changes only (with ``oldSelf``), new fields
only or new enum values only, rules that refuse less than before, and rules of a field that move to the object with this
field. A release that needs any other change must serve a new API version.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from releases import ROOT, ReleaseError, releases

Schema = Mapping[str, Any]
LOWER, UPPER = ("minimum", "minLength", "minItems"), ("maximum", "maxLength", "maxItems", "maxProperties")
EQUAL = (
    "type", "format", "pattern", "default", "exclusiveMinimum", "exclusiveMaximum", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
)  # fmt: skip


def _needs_new_field(rule: str, old: Schema) -> bool:
    """Return True if a CEL rule holds for every object without the fields that the schema ``old`` lacks.

    The rule must begin with ``!has(self.newField) ||`` or ``!has(self.a) || !has(self.a.newField) ||``, and must not
    contain the ternary operator.
    """
    begin = re.match(r"(?:!has\(self\.[\w.]+\) \|\| )+", rule)
    if begin is None or "?" in rule:
        return False
    return any(not _known(path, old) for path in re.findall(r"self\.([\w.]+)", begin[0]))


def _known(path: str, old: Schema) -> bool:
    """Return True if the schema ``old`` has the field with this path, such as dataset.uri."""
    for name in path.split("."):
        if name not in old.get("properties", {}):
            return False
        old = old["properties"][name]
    return True


def _needs_new_value(rule: str, old: Schema) -> bool:
    """Return True if a CEL rule holds for every object without the enum values that the schema ``old`` lacks.

    The rule must begin with ``!(has(self.a) && has(self.a.b) && self.a.b in ['New']) ||``, and must not contain the
    ternary operator.
    """
    begin = re.match(r"!\(((?:has\(self\.[\w.]+\) && )*)self\.([\w.]+) in \[([^]]*)\]\) \|\| ", rule)
    if begin is None or "?" in rule:
        return False
    for name in begin[2].split("."):
        old = old.get("properties", {}).get(name, {})
    values = re.findall(r"'([^']*)'", begin[3])
    return bool(values) and "enum" in old and not set(values) & set(old["enum"])


def _refuses_less(rule: str, old: Schema) -> bool:
    """Return True if every object that was valid fulfils the rule.

    It does if the rule is ``… || (former rule)`` or ``has(self.a) && has(self.b) || …`` with fields that were required.
    In both, a ternary in the first part could bind the rest to one of its branches.
    """
    for former in old.get("x-kubernetes-validations", ()):
        exempt = rule.removesuffix(f" || ({former['rule']})")
        if exempt != rule and "?" not in exempt:
            return True
    begin = re.match(r"(has\(self\.\w+\)(?: && has\(self\.\w+\))*) \|\| ", rule)
    needed = set(re.findall(r"self\.(\w+)", begin[1])) if begin is not None else set()
    return bool(needed) and needed <= set(old.get("required", ())) and "?" not in rule


def _moved_up(rule: str, old: Schema) -> bool:
    """Return True if a field of the schema ``old`` had the rule, so that every valid object fulfils it.

    The rule must be ``!has(self.field) || (former rule) || …``, with the names of the former rule below the field. A
    ternary could bind its rest to one of its branches.
    """
    for name, field in old.get("properties", {}).items():
        for former in field.get("x-kubernetes-validations", ()):
            moved = re.sub(r"\bself\.", f"self.{name}.", former["rule"])
            begin = f"!has(self.{name}) || ({moved})"
            if (rule == begin or rule.startswith(f"{begin} || ")) and "?" not in rule:
                return True
    return False


def _of_texts(schema: Schema) -> Schema:
    """Return the schema of the texts that a field accepts beside integers."""
    of_integers = ("x-kubernetes-int-or-string", "anyOf", "minimum", "maximum")
    return {key: value for key, value in schema.items() if key not in of_integers} | {"type": "string"}


def breaks(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Yield a message for each change from the schema ``old`` to ``new`` that could break a stored object.

    Such a change makes the object invalid, removes one of its fields, or changes its meaning. ``path``: path of the
    schemas in the resource, such as DLJob.spec, which begins each message.
    """
    if old.get("type") == "string" and new.get("x-kubernetes-int-or-string"):
        new = _of_texts(new)
    for key in EQUAL:
        if old.get(key) != new.get(key):
            yield f"{path}: found {key} {new.get(key)!r}; expected {old.get(key)!r}"
    for key in LOWER:
        if new.get(key, float("-inf")) > old.get(key, float("-inf")):
            yield f"{path}: found {key} {new[key]}; expected at most {old.get(key, 'none')}"
    for key in UPPER:
        if new.get(key, float("inf")) < old.get(key, float("inf")):
            yield f"{path}: found {key} {new[key]}; expected at least {old.get(key, 'none')}"
    if "enum" in new and not set(old.get("enum", ())) <= set(new["enum"]):
        yield f"{path}: found enum {new['enum']}; expected at least {old.get('enum')}"
    elif "enum" in new and "enum" not in old:
        yield f"{path}: found an enum; expected any value, as before"
    known = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        # A rule that compares an object with its previous state cannot make a stored object invalid.
        compares = "oldSelf" in rule["rule"] and not rule.get("optionalOldSelf")
        needs_new = _needs_new_field(rule["rule"], old) or _needs_new_value(rule["rule"], old)
        harmless = compares or needs_new or _refuses_less(rule["rule"], old) or _moved_up(rule["rule"], old)
        if rule["rule"] not in known and not harmless:
            yield f"{path}: found the new rule {rule['rule']!r}; expected none that a stored object could break"
    for name in set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{path}.{name}: found it required; expected it optional"
    for name, field in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}.{name}: found it removed; expected it to stay"
        else:
            yield from breaks(field, new["properties"][name], f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in old:
            yield from breaks(old[key], new.get(key, {}), f"{path}[]")


def definition_breaks(old: Schema, new: Schema) -> Iterator[str]:
    """Yield a message for each change of names, versions or schemas that breaks users of a CustomResourceDefinition.

    ``old`` and ``new`` are the CustomResourceDefinition before and after the change.
    """
    kind = old["spec"]["names"]["kind"]
    for key in ("group", "scope", "names"):
        if old["spec"][key] != new["spec"][key]:
            yield f"{kind}: found {key} {new['spec'][key]}; expected {old['spec'][key]}"
    served = {version["name"]: version for version in new["spec"]["versions"]}
    for version in old["spec"]["versions"]:
        if version["name"] not in served:
            yield f"{kind}: found no version {version['name']}; expected it to be served"
            continue
        schemas = [each["schema"]["openAPIV3Schema"] for each in (version, served[version["name"]])]
        yield from breaks(schemas[0], schemas[1], kind)


def check(root: Path = ROOT) -> list[str]:
    """Return a message for each change of the CRDs since the last recorded release that the policy forbids.

    Return an empty list if no release is recorded. Raise ReleaseError if this clone lacks the release's commit.
    """
    known = releases(root)
    if not known:
        return []
    last = known[-1]
    found: list[str] = []
    for path in sorted((root / "crds").glob("*.yaml")):
        name = f"{last.commit}:crds/{path.name}"
        command = ["git", "-C", str(root), "show", name]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if shown.returncode and "exists on disk, but not in" not in shown.stderr:
            raise ReleaseError(
                f"release {last.version}: found no file {name} in the git history of this clone; expected it there. "
                "Run git fetch --unshallow"
            )
        if shown.returncode == 0:
            found += definition_breaks(yaml.safe_load(shown.stdout), yaml.safe_load(path.read_text()))
    return found


def main() -> int:
    try:
        found = check()
    except ReleaseError as error:
        found = [str(error)]
    for line in found:
        print(f"api policy: {line}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
