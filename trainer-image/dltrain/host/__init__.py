"""The local machine: cgroup limits, heap, processes and their output, network interfaces."""
