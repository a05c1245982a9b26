"""Jobs with ``spec.task``: a look pod looks at their data before they have a model, a script and a plan."""
