"""Counts of this process: packages loaded from the cache folder, and packages compiled by this start."""

packages_loaded = 0
packages_compiled = 0
