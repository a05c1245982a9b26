"""Provide the programs of Kubernetes: from a folder, the cache, an official release archive, or a build from source."""
