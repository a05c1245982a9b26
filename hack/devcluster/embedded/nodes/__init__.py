"""Nodes: namespaces, cgroups, their first process, and the store of images that they start from."""
