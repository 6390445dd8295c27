"""Plans of embedding tables next to the programs that XLA compiles of them."""
