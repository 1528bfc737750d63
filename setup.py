"""Ships the CUDA sources, which lie at the top of the tree, inside the package; the rest is in pyproject.toml."""

from setuptools import find_packages, setup


setup(
    packages=[*find_packages(include=["hf_hisparse", "hf_hisparse.*"]), "hf_hisparse.csrc"],
    package_dir={"hf_hisparse.csrc": "csrc"},
    package_data={"hf_hisparse.csrc": ["*.cu", "*.cuh"]},
)
