"""Nodes that do not exist yet, but that an autoscaler of the cluster can add (the chart value ``autoscaling``)."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace

from dljob.cluster.catalogue import is_known_gpu
from dljob.cluster.view import ClusterView, Node, cluster_view, on_platforms

MAX_NEW_NODES = 2000
"""Maximum number of nodes that all templates may add together, so that plans consider at most this many new nodes."""
START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class NodeTemplates:
    """Nodes that do not exist yet, but that an autoscaler can add.

    ``nodes``: the nodes of all templates, where a template with the count n (its maximum number of nodes) has n nodes.
    """

    nodes: tuple[Node, ...] = ()
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds after which the operator stops the pods of a job that needs new nodes, if not all of them run.

    A job can set another time (``spec.scheduling.startTimeout``).
    """

    def without(self, devices: Collection[str]) -> "NodeTemplates":
        """Return the templates without those whose nodes have one of these device types."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.device not in devices))

    def scaled_up(self, view: ClusterView) -> ClusterView:
        """Return ``view`` plus all nodes that an autoscaler can still add.

        A node in ``view`` with the device type, the number of devices and the labels of a template counts as one that
        was already added from this template.
        """
        kinds: dict[tuple[str, int, frozenset[tuple[str, str]]], list[Node]] = {}
        for node in self.nodes:
            kinds.setdefault((node.device, node.devices, frozenset(node.labels.items())), []).append(node)
        left: list[Node] = []
        counted: set[str] = set()
        for (device, devices, labels), new in kinds.items():
            alike = [
                node.name
                for node in view.nodes
                if (node.device, node.devices, node.wrong_platform) == (device, devices, False)
                and node.name not in counted
                and labels <= node.labels.items()
            ][: len(new)]
            counted.update(alike)
            left += new[len(alike) :]
        return ClusterView((*view.nodes, *left)) if left else view


NO_TEMPLATES = NodeTemplates()


def parse_templates(text: str, architectures: Collection[str] = ()) -> tuple[Node, ...]:
    """Return every node that the templates can add. ``text``: JSON, the chart value ``autoscaling.nodeTemplates``.

    ``architectures``: those of nodes that jobs can use, as of ``ClusterView.on_platforms``.

    Each template has the fields of an entry of ``cluster_view``, with ``count``, its maximum number of nodes. Raise
    ValueError if the text is invalid or has more than ``MAX_NEW_NODES`` nodes. The message says what is expected.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"found {text!r:.200} ({error}); expected JSON, a list of node templates. Correct the chart value "
            "autoscaling.nodeTemplates"
        ) from None
    if isinstance(entries, list) and any("count" not in entry for entry in entries if isinstance(entry, dict)):
        raise ValueError(
            "autoscaling.nodeTemplates: found a template without count; expected count, the maximum number of nodes "
            "that the autoscaler may add from it. Add count"
        )
    if isinstance(entries, list):
        entries = [_with_kind(entry) for entry in entries]
    found = cluster_view({"nodes": entries}).nodes
    if len(found) > MAX_NEW_NODES:
        raise ValueError(
            f"found {len(found)} nodes in all templates; expected at most {MAX_NEW_NODES}. Lower count in a template "
            "of the chart value autoscaling.nodeTemplates"
        )
    return on_platforms((replace(node, exists=False) for node in found), architectures)


def _with_kind(entry: object) -> object:
    """Return a template with the field ``gpu``, so that a device type that seems to be a GPU is no error.

    Without GPUs, a node is one device, whatever ``devices`` says. An operator must start with values that the chart or
    an earlier release accepted.
    """
    if not isinstance(entry, dict) or not isinstance(device := entry.get("device"), str):
        return entry
    entry = {"gpu": is_known_gpu(device), **entry}
    return entry if entry["gpu"] else {key: value for key, value in entry.items() if key != "devices"}
