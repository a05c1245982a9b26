"""Read public measurements for ``benchmarks/perfmodel/published.py``, one module per format.

A module ``formats.<format>`` has one entry point, ``run(directory: Path, options: Options) -> list[Table]``. It reads
only the files of that format below ``directory``, hides from the model the values that the protocol hides, and returns
the scores of the model and of the baselines from the same run. Bad or missing files raise a ``ValueError`` that says
what was found and expected. ``scoring.table`` has Options and Table, ``scoring.scoring`` the measures, and
``formats.registry`` the names of the modules.
"""
