"""Callbacks for training libraries that report the progress of a job (``dltrain.report``).

Each module imports its library, and nothing else in dltrain imports these modules. The callbacks must run in the Python
of any image: they need Python 3.8 only, and import of dltrain what its reports need.
"""
