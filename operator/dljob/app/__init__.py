"""The operator's process: settings, logging, health, and how its parts start and end."""
