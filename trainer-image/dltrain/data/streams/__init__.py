"""Training on streams: datasets without random access, of which each rank reads its own part."""
