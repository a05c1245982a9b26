"""Which candidates are worth a full prediction, and which is best by the objective."""
