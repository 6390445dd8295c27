"""Our predictions next to published measurements, misses included."""

from rooftop.validation.accuracy import AccuracyReport, Comparison, Errors, Group, load_reasons, summarise
from rooftop.validation.runs import PublishedRun, PublishedRuns, Unusable, load_published

__all__ = [
    "AccuracyReport",
    "Comparison",
    "Errors",
    "Group",
    "PublishedRun",
    "PublishedRuns",
    "Unusable",
    "load_published",
    "load_reasons",
    "summarise",
]
