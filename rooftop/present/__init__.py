"""Answers presented: a document of verdict, figures, tables and charts, and its renderers."""
