"""The decoder: description of its parameters, layers, mixture of experts, and loss."""
