"""This machine: cgroup, heap, processes, their output, network interfaces."""
