"""Packages under other names than ``dltrain``. This folder is the last one in which Python looks for packages.

The installed file ``dltrain-compatibility.pth`` and the zygote (the process from which ranks are forked) append it to
``sys.path``. A package that is installed in the image, such as Horovod itself, therefore takes precedence.
"""
