"""Builds the container images from the repository's Dockerfiles, with Docker or with buildah."""
