"""The logical collectives of a compiled program."""
