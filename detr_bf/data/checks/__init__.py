"""Validation of detection data before training."""
