"""The planner's view of the cluster: nodes with free devices, and the catalogue of known devices."""

from dljob.cluster.view import ClusterView, Node, cluster_view, quantity

__all__ = ["ClusterView", "Node", "cluster_view", "quantity"]
