"""Settings that make a CPU faster without changing results."""
