"""Caches that no policy made, for tests of the file alone."""
