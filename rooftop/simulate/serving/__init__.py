"""Serving simulated request by request, with the scheduler that the server runs."""
