"""XLA:TPU ahead of time: compile a program for a slice that is not here, and read the result as a ledger."""
