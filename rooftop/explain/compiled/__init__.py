"""Compiled next to planned: findings, checks and rooflines of a compiled program."""
