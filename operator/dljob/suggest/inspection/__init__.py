"""Find what is special about data: types, missing values, imbalance, duplicates, leaks. Pure functions."""
