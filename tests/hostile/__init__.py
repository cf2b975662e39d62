"""Attacks on caches, bundles and the server.

A campaign is a module with `DEFAULT_COUNT` and `run(random, count) -> dict`. The entry "succeeded" of the result lists
the attacks that had an effect. scripts/attack NAME runs many attacks; test_NAME.py runs a few.
"""
