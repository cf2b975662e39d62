"""Files of a compiled kernel that no start needs. Imports nothing.

Triton stores the code of each stage of a compilation, and reads all of it back with the kernel. Launches only use the
binary, and Inductor the PTX. The others have half the files of a plan on a GPU, and two thirds of their bytes.
"""

INTERMEDIATE_CODE = (".ttir", ".ttgir", ".llir", ".source")
