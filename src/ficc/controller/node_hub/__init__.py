"""The nodes that this controller reaches, and the way to each."""
