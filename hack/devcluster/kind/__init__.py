"""The provider that runs nodes as Docker containers with kind, and the installation of kind."""
