"""The anchor cache: its format, its store, and how it is built."""
