"""Decisions without a clock and without JAX: pipeline tables, and the policy of a server, simulated and run alike."""
