"""dljob's layer with a part of Horovod's API for PyTorch. It is imported only where Horovod is not installed."""
