"""Plans of embedding tables on SparseCores: memory, exchanges, times and limits."""
