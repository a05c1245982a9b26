"""The local machine: cgroup limits, heap, network interfaces, and processes with their output."""
