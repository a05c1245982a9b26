"""A current Kubernetes API server for custom resources, from Debian unstable; the cluster of hack/ is of 2021.

``hack/crd-current`` builds and starts it with an etcd of its own, on loopback, and runs tests/crd_current there.
"""
