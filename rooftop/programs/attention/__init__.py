"""Attention kernels, and attention over a sequence that is split over devices. All are called through ``attend``."""
