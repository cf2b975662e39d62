"""The layout of a cache folder. Does not import torch.

ROOT/                      files of torch: graphs, generated code, .so files, autotune winners
ROOT/triton/               files of Triton
ROOT/aot/                  ahead-of-time packages and start records
ROOT/references/           logits that buckets are compared with
ROOT/conflicts/            files whose path another plan uses for different content (files/records.py)
ROOT/manifests/            one JSON file per plan (record/manifest.py)
ROOT/bundles/              headers and signatures of unpacked bundles (record/provenance.py)
ROOT/leases/               one lock file per plan, shared by the processes that run from it (leases.py)
ROOT/precompiled_headers/  precompiled C++ headers, shared by starts that compile; not packed into bundles
ROOT/.start-XXXX/          the staging folder of a start (staging/folder.py)
ROOT/.unpack-XXXX/         files of a bundle that is being unpacked (bundle/unpack.py)
"""

from __future__ import annotations

from pathlib import Path

TRITON_DIR = "triton"
CONFLICTS_DIR = "conflicts"  # the files in it are named by their sha256
AOT_DIR = "aot"  # ahead-of-time packages (programs/packages.py) and start records (start/record/record.py)
AUTOTUNE_DIR = "cache"  # torch's timings of the choices of max-autotune, in one file per kind of machine
REFERENCES_DIR = "references"  # engine/check/stored_reference.py
GRAPHS_DIR = "fxgraph"
# What plans list. Beside these, torch makes folders named by the first two characters of a source file's hash. An
# earlier version recorded the C++ compiler in "toolchain".
CACHE_DIRS = (GRAPHS_DIR, "aotautograd", AOT_DIR, AUTOTUNE_DIR, TRITON_DIR, "toolchain", REFERENCES_DIR)
MANIFESTS_DIR = "manifests"
BUNDLES_DIR, HEADER_SUFFIX = "bundles", ".head"
LEASES_DIR, LOCK_FILE = "leases", ".lock"
HEADERS_DIR = "precompiled_headers"
UNPACKING_PREFIX = ".unpack-"  # the unpacking process holds the folder's lock
TEST_FILE_PREFIX = ".writable-"
# What tcdeploy creates in the folder, besides torch's folders that are named by a hash.
OWN_NAMES = (*CACHE_DIRS, CONFLICTS_DIR, MANIFESTS_DIR, BUNDLES_DIR, LEASES_DIR, HEADERS_DIR, LOCK_FILE)


def manifest_path(folder: str | Path, plan_key: str) -> Path:
    return Path(folder) / MANIFESTS_DIR / f"{plan_key}.json"


def plan_keys(folder: str | Path) -> set[str]:
    """Keys of the plans that have a manifest, which may be damaged, or of another version of tcdeploy."""
    return {path.stem for path in Path(folder, MANIFESTS_DIR).glob("*.json")}


def stored_header_path(folder: str | Path, plan_key: str) -> Path:
    """Of the bundle from which the plan was unpacked."""
    return Path(folder, BUNDLES_DIR, f"{plan_key}{HEADER_SUFFIX}")
