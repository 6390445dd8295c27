"""Plans of serving: prefill and generation on a slice, fleets for a rate, and reasons."""
