"""Explanations of a decision: why this plan was chosen, why others were not, or why there is no plan."""
