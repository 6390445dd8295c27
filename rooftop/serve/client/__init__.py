"""Clients of a server: replayed traces and the simulator's prediction of them."""
