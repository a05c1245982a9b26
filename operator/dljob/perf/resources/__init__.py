"""What a step needs besides time: memory, energy and power."""
