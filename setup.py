"""Build what pyproject.toml cannot express: the examples as a part of the package, and its page on an index."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# An index shows the text without the files beside it, so each link to a file becomes the file's name.
page = re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]+)[^)]*\)", r"\1 (`\2`)", Path("README.md").read_text(encoding="utf-8"))

setup(
    long_description=page,
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["ds_topo*"]), "ds_topo.examples"],
    package_dir={"ds_topo.examples": "examples"},
    package_data={"ds_topo": ["py.typed", "mpu/fingerprints.json"], "ds_topo.examples": ["*"]},
)
