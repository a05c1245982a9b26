"""Cost of one sample: models, datasets and their layers."""
