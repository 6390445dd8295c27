"""Attention kernels and attention over a split sequence, all called through ``attend``."""
