"""What JAX does not offer as a function, each with the reason."""
