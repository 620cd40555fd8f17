"""Semantic segmentation: a class for every pixel, by UPerNet's head on any backbone, with its data and task."""
