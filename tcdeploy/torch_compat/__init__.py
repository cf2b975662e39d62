"""Every use of a private name of torch, Triton, transformers or uvicorn: one file for each.

Each file has `supported()`, which holds what is lost without the name (internal.py), and functions that do nothing, or
take a slower public way, when it is missing. `registry.missing_internals()` lists what the installed versions lack;
the Plan shows each as a fallback. tests/test_import_graph.py rejects private names outside this folder.
"""
