"""The Trainer that ``dltrain.init`` returns, with its training loop."""
