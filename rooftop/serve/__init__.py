"""Serving: an engine that runs the policy that the simulator simulates, and the HTTP server in front of it."""
