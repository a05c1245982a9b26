"""From data to a model: look at the data, recommend a model, and write a project that trains it.

``reading`` reads files, ``inspection`` finds what is special about the data, ``recommendation`` chooses the model and
asks the planner for its predictions, and ``project`` renders the scripts. ``subject`` joins these for data of any kind.
``trial`` writes projects and runs their scripts, and ``bounded_trial`` runs a baseline within the limits of a pod. Only
these two and ``reading`` do I/O, and nothing here imports torch: the written project does.
"""
