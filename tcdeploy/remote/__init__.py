"""Files under the digest of their bytes, in a folder, an object store or a container registry. Knows no torch."""
