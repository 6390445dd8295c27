"""Ledgers side by side: planned, compiled and measured."""
