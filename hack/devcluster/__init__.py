"""A Kubernetes cluster for development and tests, from one command; used by `hack/cluster` and `hack/images`.

Standard library only: it has to run on a fresh machine, before any environment exists.
"""
