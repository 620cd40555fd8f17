"""Classifiers and their pre-training: data, plug-in networks, metrics, analyses, report pages.

Training a detector imports nothing of this package.
"""
