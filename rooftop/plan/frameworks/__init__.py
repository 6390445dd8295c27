"""Plans of several frameworks for one job, and settings that a framework's configuration leaves unused."""
