"""``rooftop train``."""
