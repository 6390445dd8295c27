"""Import and export of weights, state and tokenizers."""
