"""Docstrings begin with a noun phrase or an imperative, and no text uses metaphors for code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("detr_bf", "ops", "tools", "benchmarks", "configs", "tests")
FIRST_WORDS = {"What", "Whether", "Where", "Of", "As", "Those", "Who", "Whom", "Which", "That", "How", "When"}
METAPHORS = re.compile(r"\b(rooms?|houses?|floors?|doors?)\b", re.IGNORECASE)
EXCEPTIONS = {
    "floor",
    "Floor",
    "door-stuff",
    "floor-wood",
    "house",
    "floor-other-merged",
}  # argument of torch.div, operator of ONNX, classes of COCO


def first_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring that begins with a forbidden word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or "Empty"
            if text.split()[0].strip(".,:;") in FIRST_WORDS:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of comments and string literals."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_begin_with_a_noun_phrase_or_an_imperative(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in python_files(folder)
        for line, text in first_words(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a noun phrase or an imperative:\n" + "\n".join(found)


def test_no_metaphors_in_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in python_files("detr_bf", "ops", "tools", "benchmarks")
        for line, text in prose(path.read_text(encoding="utf-8"))
        if (match := METAPHORS.search(text)) and text not in EXCEPTIONS
    ]
    assert not found, "use the field's terms instead of metaphors:\n" + "\n".join(found)


def test_no_metaphors_in_documents() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    assert ROOT / "README.md" in documents
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in documents
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := METAPHORS.search(line))
    ]
    assert not found, "use the field's terms instead of metaphors:\n" + "\n".join(found)


def test_forbidden_prose_is_found() -> None:
    source = 'def f():\n    """Whether it is."""\n    raise ValueError("no room left")  # the next door\n'
    assert list(first_words(source)) == [(1, "Whether it is.")]
    assert [match[0] for _, text in prose(source) if (match := METAPHORS.search(text))] == ["room", "door"]
