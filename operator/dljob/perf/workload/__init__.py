"""Training cost of one sample, from tables of models, their layers, and datasets."""
