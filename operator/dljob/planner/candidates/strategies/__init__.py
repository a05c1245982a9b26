"""The predicted cost of strategies that split the model or the optimizer: model parallelism, ZeRO and their hybrids."""
