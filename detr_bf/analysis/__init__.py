"""Analyses of trained detectors, and those that detectors and classifiers share, for ``detr-bf analyze``."""
