"""Plans of training: the search over strategies, the ledger of a step, memory, and reasons."""
