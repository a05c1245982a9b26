"""Choose model, loss, batch size, epochs and learning rate, and predict what the training takes."""
