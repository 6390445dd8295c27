"""``rooftop plan``."""
