"""How a config reaches a function, and how functions and their arguments are described."""
