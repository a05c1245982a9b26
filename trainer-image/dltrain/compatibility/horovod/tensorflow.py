"""Explain that dljob's layer has PyTorch alone."""

raise ImportError(
    "horovod.tensorflow: found dljob's layer, which has only horovod.torch; expected the Horovod library. "
    "Install Horovod with this framework in the image"
)
