"""Embedding tables and a DLRM: lookups, updates and steps, on any device or on SparseCores."""
