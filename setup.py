"""Package layout; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["detr_bf", "detr_bf.*"]), "detr_bf.ops", "detr_bf.configs"],
    package_dir={"detr_bf.ops": "ops", "detr_bf.configs": "configs"},
    package_data={"detr_bf": ["py.typed"], "detr_bf.configs": ["*.yaml", "*/*.yaml"]},
)
