"""Plain values: configs, trials, options, settings, errors."""
