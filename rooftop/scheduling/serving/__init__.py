"""Decisions of a serving engine, without a clock: admission, batching, paged caches, routing."""
