"""Stores bundles by the sha256 of their bytes in a folder, an object store or a container registry. Torch-free."""
