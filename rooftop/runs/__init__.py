"""A run on disk: its folder, records, checkpoints, traces, signals and supervision."""
