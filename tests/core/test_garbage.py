"""Garbage collection in processes that answer."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_there_is_never_looked_at_again() -> None:
    """In a process of its own: the tests' own objects stay as they are."""
    script = (
        "import gc, weakref\n"
        "from rooftop.core.garbage import settle\n"
        "class Node: pass\n"
        "def cycle():\n"
        "    node = Node(); node.itself = node\n"
        "    return weakref.ref(node)\n"
        "kept, before = Node(), cycle()\n"
        "settle()\n"
        "after = cycle()\n"
        "print(before() is None, after() is not None, any(item is kept for item in gc.get_objects()))\n"
        "gc.collect()\n"
        "print(after() is None, gc.get_freeze_count() > 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True True False\nTrue True\n"
