"""The XLA:TPU compiler ahead of time, and what it made of a program."""
