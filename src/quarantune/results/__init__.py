"""Results as people look at them and keep them."""
