"""Callbacks for training libraries that report the progress of a job (``dltrain.report``).

Each module imports its library, and nothing else in dltrain imports these modules.
"""
