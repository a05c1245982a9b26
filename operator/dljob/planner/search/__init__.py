"""Search for the candidates that deserve a full prediction, and for the best candidate by the objective."""
