"""Datasets of which each node fetches and stores only the shards of its ranks (``dataset.distribution: Sharded``)."""
