"""Handle failures that the coordinator of a job cannot see: lost nodes and evictions.

The package also attributes failures to nodes and applies the failure rules about conditions of nodes and pods.
"""
