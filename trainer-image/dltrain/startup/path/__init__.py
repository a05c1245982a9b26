"""The folder on the PYTHONPATH of each rank of a script from which its Python runs ``sitecustomize.py``."""
