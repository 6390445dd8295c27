"""One HLO instruction, or a few, made readable."""
