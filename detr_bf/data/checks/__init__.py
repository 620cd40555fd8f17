"""Checks of detection data before training: all errors and warnings at once, with counts and examples."""
