"""Measured next to compiled next to planned: a trace explained."""
