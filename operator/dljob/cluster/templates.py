"""Nodes that do not exist yet, but that an autoscaler of the cluster can add (the chart value ``autoscaling``)."""

import json
from dataclasses import dataclass

from dljob.cluster.view import ClusterView, Node, cluster_view

MAX_NEW_NODES = 2000
"""Maximum number of nodes that all templates may add together. Plans are made on as many nodes at most."""
START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class NodeTemplates:
    """What an autoscaler can add. ``nodes``: every node of every template, up to the template's count."""

    nodes: tuple[Node, ...] = ()
    start_timeout_s: float = START_TIMEOUT_S
    """Start time-out in seconds of a job that needs new nodes, unless the job sets one itself."""

    def scaled_up(self, view: ClusterView) -> ClusterView:
        """Return the view with all nodes that can still be added. Nodes that exist count against their template."""
        left: list[Node] = []
        existing: dict[tuple[str, int], list[Node]] = {}
        for node in view.nodes:
            existing.setdefault((node.device, node.devices), []).append(node)
        for template in self.nodes:
            kind = (template.device, template.devices)
            alike = (node for node in existing.get(kind, ()) if template.labels.items() <= node.labels.items())
            if (made := next(alike, None)) is None:
                left.append(template)
            else:
                existing[kind].remove(made)
        return ClusterView((*view.nodes, *left)) if left else view


NO_TEMPLATES = NodeTemplates()


def parse_templates(text: str) -> tuple[Node, ...]:
    """Return every node that the templates can add. ``text``: JSON, the chart value ``autoscaling.nodeTemplates``.

    Each template has the fields of an entry of ``cluster_view``. Raise ValueError with what is found and expected.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(f"found {text!r:.200}; expected JSON, a list of node templates: {error}") from None
    if isinstance(entries, list) and any("count" not in entry for entry in entries if isinstance(entry, dict)):
        raise ValueError("found a template without count; expected the number of nodes that can exist at most")
    found = cluster_view({"nodes": entries}).nodes
    if len(found) > MAX_NEW_NODES:
        raise ValueError(f"found {len(found)} nodes; expected at most {MAX_NEW_NODES}. Lower count")
    return found
