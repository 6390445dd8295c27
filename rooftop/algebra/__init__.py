"""Sharded einsums and resharding: strategies as explicit steps, their prices on a mesh, their derivatives."""
