"""The command line: one folder or module a verb, imported when the verb is called."""
