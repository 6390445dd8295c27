"""The work of a training step, one block of the model a file, in the order of the book."""
