"""Weights and folders of other projects: read, write, download."""
