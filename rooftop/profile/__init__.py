"""Measurements on the local devices, from traces or taken directly."""
