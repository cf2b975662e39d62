"""Attacks on caches, bundles and the server. A campaign is a module with `DEFAULT_COUNT` and
`run(random, count) -> dict`, whose entry "succeeded" lists the attacks that had an effect; scripts/attack runs it at
length, and test_NAME.py runs it briefly."""
