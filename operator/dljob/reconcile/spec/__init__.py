"""The spec that counts: completed for a task, without refused changes, overrides and Secrets."""
