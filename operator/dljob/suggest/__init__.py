"""From data to a model: look at the data, recommend a model, and write a project that trains it.

``reading`` reads files and is the only part with I/O, together with ``project.write``. ``inspection`` finds what is
special about the data, ``recommendation`` chooses the model and asks the planner for its predictions, and ``project``
renders the scripts. Nothing here imports torch: the written project does.
"""
