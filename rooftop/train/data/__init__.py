"""Training data: corpora, tokens, packing and batches by step."""
