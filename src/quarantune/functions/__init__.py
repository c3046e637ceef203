"""How a config reaches a function, and what is known of its calls."""
