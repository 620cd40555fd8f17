"""Errors, text, files, progress, process groups, tensors and boxes: what every other package uses."""
