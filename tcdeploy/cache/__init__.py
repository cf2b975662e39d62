"""The persistent compile cache: its folder, locks and integrity, and the manifest of each plan."""
