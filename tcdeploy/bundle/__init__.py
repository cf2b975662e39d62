"""Caches that travel: packed, signed, verified, explained, sent and fetched."""
