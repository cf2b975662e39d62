"""What a cache folder or a bundle says about each plan: its manifest and files, and their origin."""
