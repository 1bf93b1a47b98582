"""Readers as Ray actors."""
