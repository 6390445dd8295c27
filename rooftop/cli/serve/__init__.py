"""``rooftop serve``."""
