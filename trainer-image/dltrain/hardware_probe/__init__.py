"""Measure the hardware of one node in some seconds: ``python -m dltrain.hardware_probe``.

The program trains small reference networks at several batch sizes and numbers of cores, copies memory, reads and writes
a scratch file, and exchanges messages with another process. It prints one JSON document (``dlcontract.hardware``) as
the last line of its output, and writes it to the termination log of its container, if there is one. It needs no
permissions, no network unless ``--peer`` names another pod, and one folder to write to.
"""
