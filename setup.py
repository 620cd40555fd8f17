"""Package layout; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["detr_bf", "detr_bf.*"]))
