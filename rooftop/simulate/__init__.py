"""Simulations: collectives on a torus, serving request by request, pipelines, and systolic arrays."""
