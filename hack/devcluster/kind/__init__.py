"""The provider that runs nodes as Docker containers, by kind, and kind itself."""
