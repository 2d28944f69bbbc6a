"""Providers: how an executor makes a sandbox."""
