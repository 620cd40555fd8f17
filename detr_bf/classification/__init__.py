"""Classifiers and masked autoencoders: data, plug-in networks, metrics, analyses, report pages.

Training a detector imports nothing of this package.
"""
