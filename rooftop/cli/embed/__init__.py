"""``rooftop embed``."""
