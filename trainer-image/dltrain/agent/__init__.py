"""The agent, which is PID 1 of every trainer pod and starts the pod's ranks. The module ``main`` starts the agent."""
