"""Programs that a plan is of: rooftop's own, and those of the frameworks that people train with.

A framework is a TOML file in ``data/``: its releases, its habits by release, family of chips and kind of model, and its
settings, each with its source. ``framework_of`` reads it for one job; ``rooftop.plan`` prices what it says.
"""
