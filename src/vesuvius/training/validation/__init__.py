"""Held-out patches.  In: a network and fixed patches.  Out: the error per noise level, previews, texture statistics."""
