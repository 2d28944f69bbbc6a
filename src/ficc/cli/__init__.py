"""The command line: a client of the public API, and what starts the processes."""
