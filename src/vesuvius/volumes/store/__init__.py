"""Stored bytes.  In: an address.  Out: objects and parts of objects, retried and cached."""
