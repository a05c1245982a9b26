"""Generate the CustomResourceDefinitions from the API types, with the columns that ``kubectl get`` prints.

``hack/generate`` writes them to crds/ and the chart.

A CRD needs a *structural* schema: no ``$ref``, no ``null``, no ``additionalProperties: false``, and exclusive bounds as
in OpenAPI 3.0. pydantic generates JSON Schema 2020-12, and ``_structural`` translates it. Validation rules have only
``rule`` and ``message``, which every supported Kubernetes release understands. The operator evaluates the same rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from dljob.api import DLJobSpec, DLJobStatus, DLProfileSpec, DLProfileStatus, Rule
from dljob.api.base import GROUP, INT_OR_STRING, VERSION, ApiModel
from dljob.api.change_rules import change_rules

Schema = dict[str, Any]

JOB_NAME_RULE = Rule(
    field="metadata.name",
    cel="size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    message="metadata.name must have at most 40 characters, begin with a letter and contain no dots, because it is "
    "part of pod names, which are DNS labels; choose a name with lower-case letters, digits and dashes only",
    holds=lambda name: len(name) <= 40 and "." not in name and name[:1].isalpha(),
)
"""The only rule about metadata: the form of a DLJob's name.

Unlike in other rules, ``holds`` takes the name, which has passed the API server's own checks, instead of the object.
"""

_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    INT_OR_STRING,
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
)
INTEGER_OR_TEXT = [{"type": "integer"}, {"type": "string"}]
"""The only union in a structural schema. The API server accepts it in this order only."""
_DROPPED = {"title", "additionalProperties", "properties", "items", "required", "default", "$ref", "anyOf", "$defs"}
_DROPPED |= {"exclusiveMinimum", "exclusiveMaximum"}


class _WithRules(GenerateJsonSchema):
    """Schema generator that adds the rules of each type to pydantic's schema."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        result = super().model_schema(schema)
        cls: type[BaseModel] = schema["cls"]
        if issubclass(cls, ApiModel) and cls.rules:
            result["x-kubernetes-validations"] = [validation(rule) for rule in cls.rules]
        return result


def validation(rule: Rule) -> Schema:
    """Return a rule as an item of ``x-kubernetes-validations``.

    The message names the field, because not every supported Kubernetes release has ``fieldPath``.
    """
    return {"rule": rule.cel, "message": rule.text}


def structural_schema(model: type[ApiModel], *, defaults: bool) -> Schema:
    """Return the structural schema of an API type for a CRD, with the schemas of nested types inserted in place.

    ``defaults``: True to make the Python defaults API defaults, which the API server writes into each stored object, so
    that a stored spec shows the values in effect.
    """
    document = model.model_json_schema(by_alias=True, schema_generator=_WithRules)
    return _structural(document, document.get("$defs", {}), defaults)


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any], defaults: bool) -> Schema:
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _structural({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions, defaults)
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option != {"type": "null"}]
        assert len(options) == 1, f"a structural schema has no unions; found {node['anyOf']}"
        return _structural({**options[0], **{k: v for k, v in node.items() if k != "anyOf"}}, definitions, defaults)

    unknown = set(node) - set(_KEPT) - _DROPPED
    assert not unknown, f"no translation to a structural schema for {sorted(unknown)} in {node}"
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for bound in ("Minimum", "Maximum"):
        if (value := node.get(f"exclusive{bound}")) is not None:
            schema |= {bound.lower(): value, f"exclusive{bound}": True}
    if schema.get(INT_OR_STRING):
        del schema["type"]
        schema["anyOf"] = [dict(option) for option in INTEGER_OR_TEXT]
    if schema.get("type") == "integer":
        schema.setdefault("format", "int32" if node.get("maximum", 2**63) < 2**31 else "int64")
    if schema.get("type") == "number":
        schema.setdefault("format", "double")
    if defaults and (default := _pruned(node.get("default"))) not in (None, [], {}, ""):
        schema["default"] = default

    if "items" in node:
        schema["items"] = _structural(node["items"], definitions, defaults)
    if "properties" in node:
        schema["properties"] = {
            name: _structural(field, definitions, defaults) for name, field in node["properties"].items()
        }
        if node.get("required"):
            schema["required"] = list(node["required"])
    elif schema.get("type") == "object" and "additionalProperties" in node:
        if node["additionalProperties"] is True:
            schema["x-kubernetes-preserve-unknown-fields"] = True
        else:
            schema["additionalProperties"] = _structural(node["additionalProperties"], definitions, defaults)
    return schema


def _pruned(value: Any) -> Any:
    """Return ``value``, a field's default, for the CRD. If it is a map, leave out its empty members, also nested ones.

    A member is empty if it is null, an empty list or an empty map.
    """
    if isinstance(value, Mapping):
        pruned = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item not in (None, [], {})}
    return value


def _column(name: str, path: str, kind: str, description: str, wide: bool = False) -> Schema:
    column: Schema = {"name": name, "type": kind, "description": description, "jsonPath": path}
    return column | ({"priority": 1} if wide else {})


def _definition(
    kind: str,
    plural: str,
    short: str,
    scope: str,
    description: str,
    spec: Schema,
    status: Schema,
    columns: list[Schema],
    scale: Schema | None = None,
    rules: Sequence[Schema] = (),
) -> Schema:
    root: Schema = {
        "description": description,
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"Always {kind}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "required": ["spec"],
    }
    if rules:
        root["x-kubernetes-validations"] = list(rules)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["dl"],
            },
            "scope": scope,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {"status": {}} | ({"scale": scale} if scale else {}),
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def job_definition() -> Schema:
    """Return the CustomResourceDefinition of DLJob.

    The scale subresource is ``spec.nodes.max``, which ``kubectl scale --replicas`` and autoscalers set.
    """
    spec = structural_schema(DLJobSpec, defaults=True)
    return _definition(
        kind="DLJob",
        plural="dljobs",
        short="dlj",
        scope="Namespaced",
        description="DLJob is one distributed training job with its objective and limits. dljob plans the number of "
        "nodes, the devices and the local batch sizes, then runs the training and recovers it from faults.",
        spec=spec,
        status=structural_schema(DLJobStatus, defaults=False),
        scale={
            "specReplicasPath": ".spec.nodes.max",
            "statusReplicasPath": ".status.nodes",
            "labelSelectorPath": ".status.selector",
        },
        rules=(validation(JOB_NAME_RULE), *change_rules(spec)),
        columns=[
            _column("Phase", ".status.phase", "string", "Phase of the job."),
            _column("Nodes", ".status.nodes", "integer", "Nodes of the plan."),
            _column("Ready", ".status.ready", "string", "Ready pods of desired pods."),
            _column("Progress", ".status.progress.display", "string", "Completed steps in percent."),
            _column("Remaining", ".status.remaining", "string", "Estimated remaining training time, with its p90."),
            _column("Restarts", ".status.restarts", "integer", "Restarts of the ranks."),
            _column("Age", ".metadata.creationTimestamp", "date", "Time since the job was created."),
            _column("Plan", ".status.plan.summary", "string", "The plan in one line.", wide=True),
            _column("Predicted", ".status.plan.predicted.stepSeconds", "number", "Predicted step time, s.", wide=True),
            _column("Measured", ".status.measured.stepSeconds", "number", "Measured step time, s.", wide=True),
            _column("Checkpoint", ".status.lastCheckpoint.time", "date", "Age of the last checkpoint.", wide=True),
            _column("Position", ".status.queue.position", "integer", "Place in the queue.", wide=True),
            _column("Starts", ".status.queue.forecastStart", "string", "Predicted start while waiting.", wide=True),
            _column(
                "Queue", ".metadata.labels.kueue\\.x-k8s\\.io/queue-name", "string", "LocalQueue of Kueue.", wide=True
            ),
        ],
    )


def profile_definition() -> Schema:
    """Return the CustomResourceDefinition of DLProfile."""
    return _definition(
        kind="DLProfile",
        plural="dlprofiles",
        short="dlp",
        scope="Cluster",
        description="DLProfile holds the measurements of one model on one device type. The operator writes it and "
        "plans with it. If it is deleted, dljob measures again.",
        spec=structural_schema(DLProfileSpec, defaults=True),
        status=structural_schema(DLProfileStatus, defaults=False),
        columns=[
            _column("Model", ".spec.model", "string", "Model, or digest of the training script."),
            _column("Device", ".spec.device", "string", "Device type."),
            _column("Jobs", ".status.observedJobs", "integer", "Runs whose measurements are in this profile."),
            _column("Updated", ".status.updated", "date", "Time since the last update."),
            _column("Age", ".metadata.creationTimestamp", "date", "Time since it was created."),
        ],
    )


def definitions() -> tuple[Schema, ...]:
    """Return all CustomResourceDefinitions of dljob."""
    return job_definition(), profile_definition()
