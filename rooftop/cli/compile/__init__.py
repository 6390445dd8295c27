"""``rooftop compile``."""
