"""The private folder in which one start works: how it is filled from the cache folder, and published to it."""
