"""Plans in the words of their framework: its configuration and its command, and configurations as plans.

A table of ``data/words`` has the keys of a framework and their defaults. One module a framework says the value of each
word for a train step (``ConfiguredStep``), and reads the step from such values again.
"""
