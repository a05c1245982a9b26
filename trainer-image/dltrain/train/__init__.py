"""The training loop behind ``dltrain.init``."""
