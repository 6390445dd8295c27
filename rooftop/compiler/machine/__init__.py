"""A simple machine that executes a scheduled program, to find its waits."""
