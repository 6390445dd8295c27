"""A run on disk: its folder, signals, supervision, and checkpoints of its state."""
