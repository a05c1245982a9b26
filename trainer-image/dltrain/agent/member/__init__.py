"""The member part of an agent: it runs the ranks of its pod."""
