"""Sphinx configuration of the documentation site; ``make docs`` writes it to build/docs.

Sources are the Markdown files of the repository where they are, so that their links work on the site and on a code
host alike. Two kinds of comments in them are replaced: ``<!-- settings: CLASS -->`` by the table of a config class,
and ``<!-- api: MODULE -->`` by the docstrings of a module's public names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import detr_bf
from detr_bf.config import schema_of

sys.path.insert(0, str(Path(__file__).parent))

project, author, version = "detr_bf", "the detr_bf authors", detr_bf.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/**"]
exclude_patterns = ["build", "runs", ".*", "**/.*", "detr_bf", "ops", "tests", "configs", "tools", "requirements"]

html_theme = "furo"  # no script or font is loaded from another host
html_title = "detr_bf"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

CONTENTS = {
    "Guides": [
        "docs/command_line",
        "docs/data",
        "docs/settings",
        "docs/batch_attention",
        "docs/pairs",
        "docs/fine_tuning",
        "docs/comparing",
        "docs/inference",
        "docs/export",
        "docs/serving",
        "docs/thresholds",
        "docs/errors",
        "docs/faq",
        "docs/panoptic",
        "docs/segmentation",
        "docs/classifiers",
        "docs/vision_transformers",
        "docs/distributed",
        "docs/clusters",
        "docs/detectron2",
        "docs/any_encoder",
    ],
    "Reference": [
        "docs/recipes",
        "docs/files",
        "docs/operators",
        "docs/reference/settings",
        "docs/reference/api",
    ],
    "Evidence": [
        "docs/results",
        "docs/verification",
        "docs/fidelity",
        "docs/trains_like_the_original",
        "docs/gpu",
        "benchmarks/README",
    ],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}


def _expand(app: Any, name: str, source: list[str]) -> None:
    """Append the table of contents to the README, and replace the comments in the reference pages."""
    if name == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(f"/{page}" for page in pages) + "\n```\n"
            for caption, pages in CONTENTS.items()
        )
    if not name.startswith("docs/reference/"):
        return
    import settings_tables  # beside this file

    source[0] = re.sub(
        r"<!-- settings: (\w+) -->",
        lambda match: settings_tables.markdown(schema_of(match[1])),
        source[0],
    )
    source[0] = re.sub(
        r"<!-- api: ([\w.]+) -->",
        lambda match: f"```{{eval-rst}}\n.. automodule:: {match[1]}\n   :members:\n   :special-members: __call__\n```",
        source[0],
    )


def _write_index(app: Any, error: Exception | None) -> None:
    """Forward index.html to the README's page."""
    if error is None:
        page = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=README.html">\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    """Register the hooks."""
    app.connect("source-read", _expand)
    app.connect("build-finished", _write_index)
