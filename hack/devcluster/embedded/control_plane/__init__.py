"""The control plane of the embedded cluster: etcd, the API server, the controllers and the scheduler."""
