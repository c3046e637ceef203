"""Rules: decision trees from the sizes and dtypes of a call to a config."""
