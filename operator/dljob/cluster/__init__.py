"""The planner's view of the cluster: its nodes with their free resources, and the device catalogue."""

from dljob.cluster.view import ClusterView, Node, cluster_view, nodes_left, quantity

__all__ = ["ClusterView", "Node", "cluster_view", "nodes_left", "quantity"]
