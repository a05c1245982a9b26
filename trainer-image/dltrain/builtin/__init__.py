"""The built-in trainer: a training script for the built-in models. It uses the public API, like a user's script."""
