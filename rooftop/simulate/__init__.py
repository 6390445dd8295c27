"""Simulations: collectives on the links of a torus, and matmuls on a systolic array."""
