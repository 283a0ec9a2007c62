"""What a run measured, and how it is kept."""
