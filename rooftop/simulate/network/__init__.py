"""Collectives simulated link by link on a torus."""
