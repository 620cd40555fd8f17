"""Lists of packaged configs, published weights and settings."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import re
import textwrap
from pathlib import Path

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.config import packaged_configs, schema_of
from detr_bf.config.described import Setting, described_settings
from detr_bf.interop.published import PublishedWeights, list_weights, published

_WIDTH = 120


def recipes(options: argparse.Namespace) -> int:
    """List the packaged configs, or published weights, whose names match one of the patterns."""
    if options.weights:
        lines = {name: _about(published(name)) for name in list_weights()}
    else:
        lines = {
            name: str(path) if options.files else _first_sentence(path) for name, path in packaged_configs().items()
        }
    for name, text in lines.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.pattern):
            print(f"{name:<40} {text}")
    return 0


def settings(options: argparse.Namespace) -> int:
    """List the settings of a task, those of the named groups, or single ones.

    Raises:
        InputError: a key is neither a setting nor a group.
    """
    known = list(described_settings(schema_of(options.task)))
    for key in options.keys:
        if not any(_is_below(each.key, key) for each in known):
            parts = {each.key for each in known} | {each.key.rpartition(".")[2] for each in known}
            near = difflib.get_close_matches(key, sorted(parts), n=3, cutoff=0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise InputError(
                f"{printable(key)} is no setting or group of task={options.task}{hint}. 'detr-bf settings' lists all"
            )
    for each in known:
        if not options.keys or any(_is_below(each.key, key) for key in options.keys):
            print(_described(each))
    return 0


def _is_below(key: str, given: str) -> bool:
    """Return True if ``given`` is the key, one of its groups, or its last part."""
    return key == given or key.startswith(f"{given}.") or key.rpartition(".")[2] == given


def _described(setting: Setting) -> str:
    allowed = f"; {setting.allowed}" if setting.allowed else ""
    first = f"{setting.key}={setting.default}  ({setting.type}{allowed})"
    return "\n".join([first, *textwrap.wrap(setting.comment, _WIDTH, initial_indent="    ", subsequent_indent="    ")])


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the head of a config."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    text = re.split(r"(?<!et al)\. ", " ".join(lines))[0].removesuffix(".")
    return textwrap.shorten(text, _WIDTH - 41, placeholder=" ...")


def _about(weights: PublishedWeights | None) -> str:
    """Return size, licence and page of published weights."""
    assert weights is not None
    size = f"{weights.megabytes:g} MB" if weights.megabytes else "" if weights.url else "by hand"
    return f"{size:<8} {weights.licence or 'no licence stated':<18} {weights.source}"
