"""The folder on the PYTHONPATH of rank 0 from which its Python starts the observer, see ``sitecustomize.py``."""
