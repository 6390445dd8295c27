"""Plans: what a job costs on a slice, which strategy is best, and why."""
