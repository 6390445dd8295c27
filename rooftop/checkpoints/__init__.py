"""Weights, state and tokenizers in and out."""
