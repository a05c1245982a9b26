"""``spec.task``: the suggestion for a job's data, which its look pod stores, and the spec that follows from it."""
