"""Typed clients: of the executor's socket, and of the management API."""
