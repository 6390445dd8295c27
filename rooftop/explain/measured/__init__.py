"""Measured beside compiled beside planned: a trace explained."""
