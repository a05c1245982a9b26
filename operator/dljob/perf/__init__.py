"""The performance model: how long a step takes, what it needs and what it costs. White box, pure, SI units.

 One room a module: ``workload`` (what one
sample costs), ``compute``, ``data``, ``comm``, ``sync``, ``step`` (all together), ``memory``, ``energy``.
"""
