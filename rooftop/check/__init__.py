"""Advice on a compiled program without a plan: findings with their price in seconds and bytes, and its figures."""
