"""The decoder: parameters described, layers, mixture of experts, and loss."""
