"""A Kubernetes cluster for development and tests, from one command; used by `hack/cluster` and `hack/images`.

The package uses only the standard library, because it must run on a new machine, before a virtual environment exists.
"""
