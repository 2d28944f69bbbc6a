"""Private inference on machines people already have."""

__version__ = "0.1.0"
