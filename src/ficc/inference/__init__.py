"""What is asked of a service, and how engines are told: the specification, the adapter contract, the
registry, and the built-in adapters (entry points like anyone's)."""
