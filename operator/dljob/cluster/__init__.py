"""The cluster as the planner sees it: nodes with free devices, and the catalogue of known devices."""

from dljob.cluster.view import ClusterView, Node, cluster_view, quantity

__all__ = ["ClusterView", "Node", "cluster_view", "quantity"]
