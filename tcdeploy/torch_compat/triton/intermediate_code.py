"""The suffixes of a compiled kernel's files that no start needs. Imports nothing.

Triton stores the code of each stage of a compilation, and loads all of it with the kernel. Launches use only the
binary, and Inductor the PTX. In a bundle of the 8B shape with default sizes, the other code had 224 of 508 files, and
18.6 of 42.8 MB.
"""

INTERMEDIATE_CODE = (".ttir", ".ttgir", ".llir", ".source")
