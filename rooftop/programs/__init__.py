"""JAX programs: what runs is what is compiled."""
