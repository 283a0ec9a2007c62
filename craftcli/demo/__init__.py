"""The built-in demo: a small world, a real tiny pi0_fast that has learned it, and its datasets."""
