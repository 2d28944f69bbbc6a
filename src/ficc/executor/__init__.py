"""The only owner of engine processes, limits and sockets on a machine."""
