"""``rooftop bench``."""
