"""Comparisons of training settings over seeds, folds and images: experiments, statistics and their report."""
