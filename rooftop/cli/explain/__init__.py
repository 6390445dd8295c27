"""``rooftop explain``."""
