"""What the operator does about failures that the coordinator of a job cannot see: lost nodes and evictions.

It also attributes failures to nodes and applies the failure rules about conditions of nodes and pods.
"""
