"""Embedding tables on SparseCores: ids into the form that SparseCores read, and the limits that size their buffers."""
