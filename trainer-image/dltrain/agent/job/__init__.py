"""An agent's job: its settings, its plan and report, and the credentials of its agents."""
