"""Processes that compile buckets for a start."""
