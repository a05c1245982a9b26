"""Objects of the API server as the operator stores them: bounded, trimmed, cached and translated."""
