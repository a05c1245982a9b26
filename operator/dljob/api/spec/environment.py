"""``spec.trainer.env`` and ``spec.trainer.envFrom``: environment variables of the ranks, as in a core/v1 container."""

from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, DnsSubdomain, Rule

_NAME = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
_KEY = r"^[-._a-zA-Z0-9]+$"
_FIELD = (
    r"^(metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[-._/a-zA-Z0-9]+'\]|"
    r"spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs))$"
)


class KeySelector(ApiModel):
    """A key of a Secret or a ConfigMap in the job's namespace."""

    name: Annotated[DnsSubdomain, Field(description="Name of the object.")]
    key: Annotated[str, Field(pattern=_KEY, max_length=253, description="Key in the object.")]
    optional: Annotated[
        bool | None, Field(description="true: the variable is not set if object or key do not exist. Default: false.")
    ] = None


class FieldSelector(ApiModel):
    """A field of the pod."""

    field_path: Annotated[
        str,
        Field(pattern=_FIELD, max_length=512, description="Path of the field, such as metadata.name or spec.nodeName."),
    ]


class EnvSource(ApiModel):
    """Source of the value of a variable."""

    rules = (
        Rule(
            "secretKeyRef",
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(x, x).size() == 1",
            "set exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            lambda s: [s.secret_key_ref, s.config_map_key_ref, s.field_ref].count(None) == 2,
        ),
    )

    secret_key_ref: Annotated[KeySelector | None, Field(description="A key of a Secret that jobs may use.")] = None
    config_map_key_ref: Annotated[KeySelector | None, Field(description="A key of a ConfigMap.")] = None
    field_ref: Annotated[FieldSelector | None, Field(description="A field of the pod.")] = None


class EnvVar(ApiModel):
    rules = (
        Rule(
            "valueFrom",
            "!has(self.valueFrom) || !has(self.value) || self.value == ''",
            "valueFrom cannot be combined with value: remove one of them",
            lambda v: v.value_from is None or v.value == "",
        ),
    )

    name: Annotated[str, Field(pattern=_NAME, max_length=256, description="Name of the variable.")]
    value: Annotated[str, Field(max_length=32768, description="Literal value; $(VAR) is not expanded.")] = ""
    value_from: Annotated[EnvSource | None, Field(description="Source of the value, in place of a literal value.")] = (
        None
    )


class ObjectSelector(ApiModel):
    """A Secret or a ConfigMap in the job's namespace."""

    name: Annotated[DnsSubdomain, Field(description="Name of the object.")]
    optional: Annotated[bool | None, Field(description="true: the object need not exist. Default: false.")] = None


class EnvFrom(ApiModel):
    """An object whose keys become environment variables."""

    rules = (
        Rule(
            "secretRef",
            "has(self.secretRef) != has(self.configMapRef)",
            "set exactly one of secretRef and configMapRef",
            lambda e: (e.secret_ref is None) != (e.config_map_ref is None),
        ),
    )

    prefix: Annotated[
        str | None, Field(pattern=_NAME, max_length=256, description="Text before each variable's name.")
    ] = None
    secret_ref: Annotated[ObjectSelector | None, Field(description="A Secret that jobs may use.")] = None
    config_map_ref: Annotated[ObjectSelector | None, Field(description="A ConfigMap.")] = None
