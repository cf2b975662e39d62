"""Who may have written a cache: signatures, the origin of a plan's files, and the owners of folders."""
