"""The persistent compile cache.

    trust/      signatures of bundles, and the owners of folders
    folder/     the cache folder as a whole: its layout, who may change it, and its locks
    files/      single files in it: records with their sha256, and which of them a process uses
    record/     what is known of each plan: its manifest, and the bundle that it came from
    staging/    the private folder of one start: how it is filled, and how its files are published
    inventory   list, measure and delete what a folder holds

Each room imports only those above it.
"""
