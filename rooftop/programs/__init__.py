"""JAX programs for training, serving and embedding: the program that runs is the one that is compiled."""
