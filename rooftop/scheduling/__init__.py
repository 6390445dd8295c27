"""Schedules without a clock: which stage of a pipeline does what, in which order."""
