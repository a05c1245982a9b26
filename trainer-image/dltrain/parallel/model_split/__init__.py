"""Pipeline and tensor parallelism: each rank has a part of the model."""
