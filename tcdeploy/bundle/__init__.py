"""Bundles: a plan's compile cache as one signed file. Packs, verifies, unpacks, compares and fetches them."""
