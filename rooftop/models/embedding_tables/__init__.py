"""Embedding tables: their features, stacks, limits and files."""
