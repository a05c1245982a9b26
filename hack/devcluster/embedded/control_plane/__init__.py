"""etcd, the API server, controllers and scheduler: certificates and command lines."""
