"""Raise ImportError at the import of ``horovod.keras``, because dljob's layer has only ``horovod.torch``."""

raise ImportError(
    "horovod.keras: found dljob's layer, which has only horovod.torch; expected the Horovod library. "
    "Install Horovod with this framework in the image"
)
