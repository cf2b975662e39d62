"""Regions of the model, the programs compiled for them, and the ledger that counts compiles and cache hits."""
