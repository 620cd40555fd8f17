"""Comparison of the arms of an experiment: intervals, tests, per-image tables of finished runs, the result document."""
