"""Commands on programs and plans that are compiled: ``rooftop compile``, ``check`` and ``tune``."""
