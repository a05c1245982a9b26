"""The embedded provider: a multi-node Kubernetes on one Debian machine, without Docker.

The control plane runs as ordinary processes. Each node has its own kubelet, containerd and kube-proxy, which run in
network, mount, UTS, IPC and PID namespaces and in a cgroup that can have a quota.
"""
