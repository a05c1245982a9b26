"""Raise ImportError at the import of ``horovod.mxnet``, because dljob's layer has only ``horovod.torch``."""

raise ImportError(
    "horovod.mxnet: found dljob's layer, which has only horovod.torch; expected the Horovod library. "
    "Install Horovod with this framework in the image"
)
