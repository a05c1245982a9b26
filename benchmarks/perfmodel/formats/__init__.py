"""Adapters of ``benchmarks/perfmodel/published.py``: public measurements, one module a format.

A module ``formats.<format>`` has one entry, ``run(directory: Path, options: Options) -> list[Table]``. It reads the
files of that format below ``directory`` (and nothing else), hides from the model what the protocol hides, and returns
what it scored: the model's row beside those of the baselines, computed in the same run. Bad or missing files are a
``ValueError`` that says what was found, expected and to do. ``scoring.table`` has Options and Table,
``scoring.scoring`` the measures; ``formats.registry`` names the modules.
"""
