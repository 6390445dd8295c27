"""Scheduled HLO as data: text, data flow, matmuls, costs and scopes of instructions."""
