"""Serving engines on GPUs: their kernels, the steps that are made of them, and a closed loop of clients."""
