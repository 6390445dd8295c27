"""Measurements of single collectives and matmuls on the local devices."""
