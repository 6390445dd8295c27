"""Measurements of single collectives and matmuls on the devices here."""
