"""Rooflines: what collectives, matmuls and whole ledgers cost on a chip and its network."""
