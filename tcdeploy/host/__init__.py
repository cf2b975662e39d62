"""The process and its machine: files, memory, imports, the garbage collector, and the progress of a start."""
