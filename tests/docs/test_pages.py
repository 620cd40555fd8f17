"""Markdown pages: links, anchors, named files, setting keys, commands, imports, line length."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.commands import COMMANDS
from detr_bf.config import DetectionConfig, known_keys
from detr_bf.detectors.declaration import DetectorKind
from detr_bf.segmentation.config import SegmentationConfig

ROOT = Path(__file__).parents[2]
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
NAMES += sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
NAMED = re.compile(
    r"\b(?:configs/[\w/-]+\.yaml|examples/[\w/.]*\w|(?:tools|docs|benchmarks)/(?!test_)\w+\.(?:py|md|sh|png))"
)
OWN_FILE = re.compile(r"`((?:detr_bf|tests|docs)/[\w/.-]+)`")
IDENTIFIER, PYTHON_FILE = r"`((?!\w+\.py`)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", r"`((?:[\w.-]+/)*\w+\.py)`"
KEY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z0-9_]+)+)=")
QUOTED_KEY = re.compile(
    r"`((?:model|batch_former|plugins|freeze|loss|data|optimizer|train|checkpoint|eval)\.[a-z0-9_.]+)[`=]"
)
TASKS = (DetectionConfig, ClassifierConfig, MaskedConfig, ContrastiveConfig, SegmentationConfig)


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """Return a page without code blocks and code spans, whose links are not links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text(name), flags=re.DOTALL | re.MULTILINE))


@cache
def anchors(name: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and MyST derive them."""
    found: dict[str, int] = {}
    without_code = re.sub(r"^```.*?^```$", "", text(name), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", without_code, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if count == 0 else f"{slug}-{count}" for slug, last in found.items() for count in range(last + 1)}


def broken_links(name: str) -> Iterator[str]:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(name)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        if not linked.exists() or (anchor and anchor not in anchors(linked.resolve().relative_to(ROOT).as_posix())):
            yield target


def python_blocks() -> list[tuple[str, str]]:
    return [(name, block) for name in NAMES for block in re.findall(r"```python\n(.*?)```", text(name), re.DOTALL)]


@pytest.mark.parametrize("name", NAMES)
def test_links_and_anchors_exist(name: str) -> None:
    assert list(broken_links(name)) == []


def test_a_broken_link_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "text", {"README.md": "# A b\n[x](docs/faq.md#no) [y](no.md) [z](#a-b)"}.get)
    anchors.cache_clear()
    monkeypatch.setitem(globals(), "anchors", lambda name: {"a-b"} if name == "README.md" else set())
    assert list(broken_links("README.md")) == ["docs/faq.md#no", "no.md"]


@pytest.mark.parametrize("name", NAMES)
def test_files_that_a_page_names_exist(name: str) -> None:
    own = set() if name == "docs/fidelity.md" else set(OWN_FILE.findall(text(name)))  # its files are tested below
    named = {each for each in (*NAMED.findall(text(name)), *own) if "NAME" not in each}
    assert not [each for each in sorted(named) if not (ROOT / each).exists()]


def test_files_in_the_fidelity_tables_exist() -> None:
    """Files are named there relative to detr_bf/ and tests/."""
    named = set(re.findall(r"`([\w/]+\.py)`", text("docs/fidelity.md")))
    assert len(named) > 30
    folders = (ROOT, ROOT / "detr_bf", ROOT / "tests")
    assert not [each for each in sorted(named) if not any((folder / each).exists() for folder in folders)]


def missing_tests(page: str) -> list[str]:
    """Return the tests that ``page`` names as ``tests/FILE.py::NAME`` and that their file does not define."""
    named = sorted(set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", page)))
    files = {file for file, _ in named if (ROOT / file).exists()}
    return [f"{file}::{test}" for file, test in named if file not in files or test not in defined_names(ROOT / file)]


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_a_page_names_exist(name: str) -> None:
    assert missing_tests(text(name)) == []
    assert name != "docs/trains_like_the_original.md" or text(name).count(".py::test_") > 40


def test_a_wrong_name_of_a_test_is_found() -> None:
    own = "tests/docs/test_pages.py::test_"
    wrong = [f"{own}that_does_not_exist", "tests/no/such_file.py::test_links_and_anchors_exist"]
    assert missing_tests(f"`{own}readme_is_short`, `{wrong[1]}` and `{wrong[0]}`") == wrong


@cache
def defined_names(path: Path) -> set[str]:
    """Return the functions, classes, methods, fields and constants of a module: ``f``, ``A``, ``A.f``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        outer = names_of(node)
        found |= outer
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in names_of(inner)}
    return found


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def names_with_files(page: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a page says is in a Python file, with the file.

    The forms are "`NAME` in `FILE`", a row of a table "| `FILE` | `NAME`, `NAME` |", and an item of a list
    "1. `FILE`: ... in `NAME`".
    """
    yield from re.findall(rf"{IDENTIFIER}\s+(?:in|of|at)\s+{PYTHON_FILE}", page)
    for file, cell in re.findall(rf"^\| {PYTHON_FILE} \| ([^|]*) \|", page, re.MULTILINE):
        yield from ((name, file) for name in re.findall(IDENTIFIER, cell))
    for file, item in re.findall(rf"^\d+\. {PYTHON_FILE}(.*(?:\n   .*)*)", page, re.MULTILINE):
        yield from ((name, file) for name in re.findall(rf"\bin\s+{IDENTIFIER}(?!\s+(?:in|of|at)\s+`)", item))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_in_the_files_that_a_page_names(name: str) -> None:
    found = {(each, file) for each, file in names_with_files(text(name)) if "NAME" not in file}
    wrong = [(each, file) for each, file in sorted(found) if each not in defined_names(ROOT / file)]
    assert not wrong
    assert name != "CONTRIBUTING.md" or len(found) > 60


def test_a_name_that_is_not_in_its_file_is_found() -> None:
    page = "see `a`\nin `x/y.py`\n\n| `z.py` | `B.c`, `d` | `e` |\n\n1. `w.py`: one line in\n   `F` (a `g`).\n"
    assert list(names_with_files(page)) == [("a", "x/y.py"), ("B.c", "z.py"), ("d", "z.py"), ("F", "w.py")]
    names = defined_names(ROOT / "detr_bf" / "detectors" / "declaration.py")
    assert {"declare", "DetectorKind.settings", "DetectorKind.own"} <= names
    assert "own" not in names


def test_all_needs_of_a_detector_are_explained() -> None:
    needs = {each.name for each in dataclasses.fields(DetectorKind)} - {"build", "own"}
    assert not [need for need in sorted(needs) if f"`{need}=" not in text("CONTRIBUTING.md")]


def test_names_are_found() -> None:
    found = {name for page in NAMES for name in (*NAMED.findall(text(page)), *OWN_FILE.findall(text(page)))}
    assert {"configs/demo.yaml", "tools/train_net.py", "docs/recipes.md", "detr_bf/batchformer/v2.py"} <= found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("CHANGELOG.md", "docs/detectron2.md")])
def test_setting_keys_exist(name: str) -> None:
    keys = {key for schema in TASKS for key in known_keys(schema)}
    groups = {key.rpartition(".")[0] for key in keys}
    files = (".json", ".yaml", ".py", ".safetensors")
    named = {*KEY.findall(text(name)), *(key for key in QUOTED_KEY.findall(text(name)) if not key.endswith(files))}
    named -= {key for key in named if key.split(".")[0] in ("arrays", "evaluation")}
    named = {key for key in named if not key.startswith("model.options.")}  # arguments of timm.create_model
    assert not [key for key in sorted(named) if key not in keys and key.rstrip(".") not in groups]


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_recipes_exist(name: str) -> None:
    assert set(re.findall(r"detr-bf ([a-z][\w-]*)", text(name))) <= set(COMMANDS) | {"train|evaluate|predict"}
    stems = {path.stem for path in (ROOT / "configs").rglob("*.yaml")}
    recipes = re.findall(r"detr-bf (?:train|evaluate|check|plan) (?:--config )?([a-z]\w+)(?=[\s`])", text(name))
    assert set(recipes) <= stems


@pytest.mark.parametrize(("name", "block"), python_blocks())
def test_python_examples_compile_and_their_imports_exist(name: str, block: str) -> None:
    for node in ast.parse(block).body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).startswith("detr_bf"):
            if "detectron2" in str(node.module):
                continue
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_python_example_of_batch_attention_runs() -> None:
    # tests/common/test_extensions.py runs the other section
    section = text("docs/batch_attention.md").partition("## As a module")[2]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "batch_attention.md", "exec"), names)
    assert names["encoder"].batch_former.insertions == (0,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_wrapped_at_120_characters(name: str) -> None:
    lines = text(name).splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]


def test_readme_is_short() -> None:
    assert len(text("README.md").split()) <= 1300


def test_every_page_is_in_the_table_of_contents_of_the_site() -> None:
    listed = set(re.findall(r'"((?:docs|benchmarks)/[\w/]+|[A-Z]+)"', text("docs/conf.py")))
    assert {name.removesuffix(".md") for name in NAMES} - {"README"} <= listed
