"""Answers presented: documents and their renderers."""
