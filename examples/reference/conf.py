"""Build the guides and the API reference: ``sphinx-build -c examples/reference examples OUTPUT``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

project = "ds_topo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
root_doc = "README"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Text": "str"}
python_maximum_signature_line_length = 100


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """List the pages beside every page, in the order in which the first page links to them."""
    if page == root_doc:
        pages = dict.fromkeys(re.findall(r"\]\(([\w/]+)\.(?:md|rst)\b", source[0]))
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", *pages, "```"])


def copy_first_page(app: Any, exception: Exception | None) -> None:
    """Let the folder open with the first page."""
    if exception is None:
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def shorten_signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """Leave out the arguments of records that only files make, which Pydantic describes at length."""
    return ("", None) if signature and "FieldInfo" in signature else None


def setup(app: Any) -> None:
    """Register the functions."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("build-finished", copy_first_page)
