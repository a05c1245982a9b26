"""The embedded provider: a multi-node Kubernetes on one Debian machine, without Docker.

The control plane runs as plain processes; every node is a kubelet, a containerd and a kube-proxy of its own in
network, mount, UTS and PID namespaces, with a cgroup that can carry a quota.
"""
