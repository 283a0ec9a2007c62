"""Training under the retention constraint."""
