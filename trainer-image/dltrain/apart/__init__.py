"""Training by a parameter server at every worker's own pace: ``training`` begins it. Users: ``rank``."""
