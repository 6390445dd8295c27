"""Times of planned servers: of any of their steps, and of requests of clients that wait for their answers."""
