"""Access to jobs and to the state of a cluster, shared by the command line and the Python SDK.

Functions that send requests take a client of type ``dljob.kube.Api``. The modules import the operator's dependencies
only inside functions, so that planning from files works without them.
"""
