"""Ledgers joined: planned, compiled and measured work, and the findings and advice that follow."""
