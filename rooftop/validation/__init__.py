"""Our predictions beside published measurements, misses included."""

from rooftop.validation.accuracy import Comparison, Errors, Group, Report, load_reasons, summarise
from rooftop.validation.runs import PublishedRuns, Run, Unusable, load_published

__all__ = [
    "Comparison",
    "Errors",
    "Group",
    "PublishedRuns",
    "Report",
    "Run",
    "Unusable",
    "load_published",
    "load_reasons",
    "summarise",
]
