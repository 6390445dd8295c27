"""``rooftop matmul``."""
