"""The nodes of a plan's pods, as requirements on their labels, in the form in which a plan is stored."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dljob.cluster.domains import Domain

MAX_TERMS = 32
"""Maximum number of terms of the domain in a stored plan."""


class NodeRequirement(BaseModel):
    """A requirement on a label of the nodes of a plan's pods, as in a node affinity."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Annotated[str, Field(max_length=317)]
    operator: Literal["In", "NotIn"]
    values: tuple[Annotated[str, Field(max_length=63)], ...]


def node_terms(domain: Domain) -> tuple[tuple[NodeRequirement, ...], ...] | None:
    """Return the terms of a domain (a part of the cluster) in the form of ``StoredPlan.domain``.

    Each term is a tuple of requirements. A node belongs to the domain if it meets all requirements of one of the terms.
    Return None if every node belongs to the domain.
    """
    return (
        tuple(
            tuple(NodeRequirement(key=r.key, operator=r.operator, values=r.values) for r in term)
            for term in domain.terms
        )
        or None
    )
