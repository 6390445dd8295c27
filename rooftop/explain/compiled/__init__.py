"""Compiled beside planned: findings, checks and rooflines of a compiled program."""
