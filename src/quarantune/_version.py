"""The package's version, in the one place that both the package and its build read."""

__version__ = "0.1.0"
