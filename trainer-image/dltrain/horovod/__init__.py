"""A layer with the part of Horovod's API for PyTorch that most scripts use, over mpi4py.

``compatibility/horovod`` offers it as ``horovod.torch`` where Horovod itself is not installed.
"""
