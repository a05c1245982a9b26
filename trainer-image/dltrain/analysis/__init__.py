"""Analyses of held-out predictions: of classes, numbers and tokens, over all ranks. This package needs numpy alone.

``result`` describes the results and needs the standard library only, so that agents can read them.
"""
