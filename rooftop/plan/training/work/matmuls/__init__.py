"""Matmuls with their weights: gathered, multiplied three times, and their gradients scattered.

Chapter 5 of the book. Forward is [T, k] x [k, n]; backward is dX = [T, n] x [n, k] and dW = [k, T] x [T, n].
"""
