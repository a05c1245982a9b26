"""What one sample costs: models, datasets and their layers."""
