"""The operator's process: settings, logging, health checks, start and shutdown."""
