"""The ground floor: the ledger and its scopes, quantities, errors, files, timelines and JSON schemas."""
