"""The agent, PID 1 of every trainer pod. ``main`` starts it."""
