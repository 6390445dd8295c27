"""Debian's Chromium, which tests of pages drive."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = shutil.which("chromium")
#: tests/conftest.py counts skips for this reason by themselves.
NO_BROWSER = "no chromium on the PATH (Debian: apt install chromium)"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
