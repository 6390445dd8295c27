"""One's own programs and plans, compiled: read, checked against limits, and tuned."""
