"""Explain that dljob's layer has PyTorch alone."""

raise ImportError(
    "horovod.tensorflow: found dljob's layer, which has horovod.torch alone; expected Horovod itself. "
    "Install Horovod and its framework in the image"
)
