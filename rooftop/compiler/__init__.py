"""XLA:TPU and XLA:GPU ahead of time: compile a program for a remote slice, and read the result as a ledger."""
