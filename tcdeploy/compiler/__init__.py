"""Regions found, programs compiled into them, and the cache and the ledger that prove it."""
