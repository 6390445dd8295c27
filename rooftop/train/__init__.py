"""The training engine: data in, steps, checkpoints, a live view."""
