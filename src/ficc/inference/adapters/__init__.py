"""The built-in adapters."""
