"""The persistent compile cache: its folder, the manifest of each plan, and the files that a start needs."""
