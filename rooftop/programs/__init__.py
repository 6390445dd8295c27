"""JAX programs. The program that is compiled is the program that runs."""
