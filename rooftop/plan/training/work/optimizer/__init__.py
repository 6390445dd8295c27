"""The end of a step: gradients summed, and the optimizer with the collectives of its own."""
