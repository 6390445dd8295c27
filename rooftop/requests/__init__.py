"""Requests: one frozen, typed record a verb, and the vocabulary of its fields.

Options of the command line, ``--help``, completion, the reference pages and the JSON of a request follow from them.
"""
