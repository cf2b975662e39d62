"""Single files of a cache folder: their records, and which of them a process uses."""
