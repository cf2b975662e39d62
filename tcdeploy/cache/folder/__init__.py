"""The cache folder as a whole: its layout, who may change it, and its locks."""
