"""A simple machine that runs a scheduled program to see what waits."""
