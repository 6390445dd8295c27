"""Plans of embedding tables beside the programs that XLA compiles of them."""
