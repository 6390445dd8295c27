"""Signals that stop a server's processes."""

from __future__ import annotations

import signal


def stopping_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP (a terminal that is closed) unless it is ignored, as under ``nohup``."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)
