"""Weights and tokenizers in published formats, in and out."""
