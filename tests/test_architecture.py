"""Imports between the folders of ``detr_bf`` point down, and functions and files are short.

``python tests/test_architecture.py`` prints the numbers of the graph of folders and of the reading paths.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "detr_bf"
OUTSIDE = {"tools", "tests", "benchmarks"}  # they import the package, never the reverse

# What each folder may import, from the bottom up. A folder within another stands on its own. `ops` lies outside the
# package, only `assembly` turns configs of detectors into objects, and a detector's run imports nothing of
# `classification`.
_IMPORTS = {
    "ops": "",
    "common": "",
    "acceleration": "",
    "config": "common",
    "batchformer": "ops common",
    "losses": "common",
    "data": "common acceleration",
    "data/samples": "common data",
    "data/checks": "common data",
    "data/formats": "common data data/checks",
    "evaluation": "common acceleration losses data",
    "report": "common config data data/checks evaluation",
    "transformer": "ops common batchformer",
    "backbones": "common batchformer",
    "detectors": "common batchformer transformer",
    "plugins": "common batchformer losses transformer",
    "engine": "common acceleration batchformer losses data evaluation transformer backbones",
    "interop": "common batchformer backbones detectors",
    "export": "ops common batchformer losses data evaluation transformer detectors engine interop",
    "assembly": "common acceleration config batchformer losses data data/checks data/formats transformer "
    "backbones detectors plugins engine interop export",
    "planning": "ops common config batchformer data transformer detectors engine assembly",
    "tasks": "common acceleration config data data/checks data/formats evaluation report detectors engine "
    "interop assembly planning",
    "classification": "common acceleration config batchformer losses data data/samples data/checks evaluation "
    "report transformer backbones plugins engine interop assembly tasks",
    "segmentation": "common acceleration config losses data data/checks evaluation report backbones engine interop "
    "assembly tasks",
    "inference": "common config batchformer losses data data/formats evaluation report detectors engine "
    "interop export assembly tasks classification segmentation",
    "comparison": "common config data/formats evaluation report engine assembly tasks",
    "analysis": "common config batchformer losses data evaluation report transformer plugins engine assembly "
    "tasks classification segmentation",
    "commands": "common acceleration config data data/samples data/checks data/formats evaluation report "
    "plugins engine interop export assembly planning tasks classification segmentation inference comparison "
    "analysis",
    "detectron2": "common config losses data evaluation backbones detectors engine interop assembly inference",
    "__init__": "common interop inference",
    "__main__": "commands",
}
ALLOWED = {folder: set(below.split()) for folder, below in _IMPORTS.items()}
ORDER = list(ALLOWED)
FORBIDDEN_LIBRARIES = {"config": {"torch", "torchvision", "timm"}}

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600

parsed = cache(ast.parse)


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import in ``source``, a file of ``package`` (for relative imports)."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*ancestors, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def folder_of(parts: Sequence[str]) -> str:
    """Return the folder of a module or a name, given by its parts below ``detr_bf``, as in :data:`ALLOWED`."""
    nested = "/".join(parts[:2])
    return nested if nested in ORDER else parts[0]


def forbidden_imports(source: str, path: str) -> list[str]:
    """Report each import that ``path`` (relative to the package, ``data/coco.py``) may not have."""
    parts = Path(path).with_suffix("").parts
    owner, package = folder_of(parts), ".".join(("detr_bf", *parts[:-1]))
    if owner not in ORDER or (len(parts) == 1 and not owner.startswith("__")):
        return [f"detr_bf/{path}: '{owner}' is no folder of ALLOWED in tests/test_architecture.py"]
    if len(parts) > 2 and "/".join(parts[:2]) not in ORDER:
        return [f"detr_bf/{path}: the folder has no line in ALLOWED of tests/test_architecture.py"]
    found = []
    for line, name in imported_names(source, package):
        top, *rest = name.split(".")
        where = f"detr_bf/{path}:{line}"
        if top in OUTSIDE:
            found.append(f"{where}: the package must not import {top}")
        elif top in FORBIDDEN_LIBRARIES.get(owner, ()):
            found.append(f"{where}: '{owner}' must work without {top}")
        elif top == "detr_bf" and (not rest or folder_of(rest) not in ALLOWED[owner] | {owner}):
            allowed = ", ".join(sorted(ALLOWED[owner])) or "nothing of ours"
            found.append(f"{where}: '{owner}' must not import {name}; it may import {allowed}")
    return found


def too_long(source: str, path: str) -> list[str]:
    """Report the file and each of its functions if longer than allowed."""
    lines = len(source.splitlines())
    found = [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_imports_point_down() -> None:
    files = [(path, path.relative_to(PACKAGE).as_posix()) for path in python_files(PACKAGE)]
    files += [(path, path.relative_to(ROOT).as_posix()) for path in python_files(ROOT / "ops")]  # detr_bf.ops
    assert {"common/structures.py", "ops/library.py"} <= {name for _, name in files}
    faults = [fault for path, name in files for fault in forbidden_imports(path.read_text(encoding="utf-8"), name)]
    assert not faults, "imports must point down (CONTRIBUTING.md):\n" + "\n".join(faults)


def module_graph() -> dict[str, set[str]]:
    """Map each module to the modules of ``detr_bf`` that its import imports, except in functions and for types."""
    files = {
        path: "detr_bf." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in python_files(PACKAGE)
    }
    names = {name.removesuffix(".__init__") for name in files.values()}
    graph: dict[str, set[str]] = {}
    for path, name in files.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        found = {
            f"{node.module}.{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        } | {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        parents = {whole.rpartition(".")[0] for whole in found}
        graph[name.removesuffix(".__init__")] = (found | parents) & names - {name.removesuffix(".__init__")}
    return graph


def test_no_module_imports_itself_in_a_circle() -> None:
    """A package and its own modules count as one: a package imports its modules to re-export their names."""
    graph = module_graph()
    assert "detr_bf.detectors.detr" in graph["detr_bf.detectors"]
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"modules import each other: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                if not (name.startswith(f"{other}.") or other == "detr_bf"):
                    visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_functions_and_files_are_short() -> None:
    files = python_files(PACKAGE, ROOT / "ops", ROOT / "tools", ROOT / "benchmarks")
    faults = [
        fault
        for path in files
        for fault in too_long(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    assert not faults, "split what does more than one thing:\n" + "\n".join(faults)


def folder_graph() -> dict[str, set[str]]:
    """Map each folder to those that a file of it imports, in functions and for types as well."""
    graph: dict[str, set[str]] = {}
    for path in [*python_files(PACKAGE), *python_files(ROOT / "ops")]:
        parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").parts
        names = imported_names(path.read_text(encoding="utf-8"), ".".join(("detr_bf", *parts[:-1])))
        below = {folder_of(name.split(".")[1:]) for _, name in names if name.startswith("detr_bf.")}
        graph.setdefault(folder_of(parts), set()).update(below - {folder_of(parts), "configs"})
    return graph


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the length of the longest chain of imports below each folder of a graph without circles."""
    found: dict[str, int] = {}
    for name in ORDER:
        found[name] = 1 + max((found[below] for below in graph.get(name, ())), default=0)
    return found


def test_the_graph_of_folders_is_flat() -> None:
    graph = folder_graph()
    assert graph == ALLOWED, "every folder has its line in ALLOWED, with what it imports and nothing else"
    for folder, below in ALLOWED.items():
        assert below <= set(ORDER[: ORDER.index(folder)]), f"'{folder}' may only import folders earlier in ALLOWED"
    assert len(ALLOWED) <= 32
    assert max(levels(graph).values()) <= 13
    assert len(list(PACKAGE.glob("*.py"))) <= 3


@pytest.mark.parametrize(
    ("path", "source", "culprit"),
    [
        ("losses/matcher.py", "from detr_bf.engine.loop import train", "detr_bf.engine.loop.train"),
        ("transformer/mlp.py", "from ..data import images", "detr_bf.data.images"),
        ("engine/loop.py", "import detr_bf.assembly as b", "detr_bf.assembly"),
        ("engine/loop.py", "def f():\n    from detr_bf import config", "detr_bf.config"),
        ("losses/postprocess.py", "import detr_bf", "detr_bf"),
        ("data/coco.py", "import os, tools.train_net", "tools"),
        ("config/detection.py", "import torch.nn as nn", "torch"),
        ("novelty/x.py", "import os", "novelty"),
        ("novelty.py", "import os", "novelty"),
        ("data/novelty/x.py", "import os", "data/novelty"),
        ("data/coco.py", "from detr_bf.data.formats import voc", "detr_bf.data.formats.voc"),
        ("assembly/run.py", "from detr_bf.detectron2 import recipe", "detr_bf.detectron2.recipe"),
        ("tasks/x.py", "def f():\n    import detr_bf.classification.task", "detr_bf.classification.task"),
        ("detectron2/x.py", "from detr_bf.commands import main", "detr_bf.commands.main"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, culprit: str) -> None:
    [sentence] = forbidden_imports(source, path)
    assert path in sentence
    assert culprit in sentence


def test_allowed_imports_pass() -> None:
    source = (
        "import torch\n"
        "from detr_bf.common import boxes\n"
        "from detr_bf.losses.giou import giou_loss\n"
        "from .matcher import match\n"
        "from ..common.structures import Target\n"
        "import torchdetr_bf\n"
    )
    assert forbidden_imports(source, "losses/set_criterion.py") == []
    assert forbidden_imports("from ..engine import x", "losses/postprocess.py") != []


def test_long_code_is_found() -> None:
    body = "    x = 1\n"
    assert too_long("def f():\n" + body * (MAX_FUNCTION_LINES - 1), "a.py") == []
    assert too_long("def f():\n" + body * MAX_FUNCTION_LINES, "a.py") == ["a.py:1: f has 61 lines, at most 60"]
    assert too_long("x = 1\n" * (MAX_FILE_LINES + 1), "a.py") == [
        f"a.py: {MAX_FILE_LINES + 1} lines, at most {MAX_FILE_LINES}"
    ]


def test_detectors_are_short_and_hold_only_their_difference() -> None:
    """At most 250 lines per file, and no six consecutive lines of code in two files."""
    windows: dict[str, str] = {}
    for path in python_files(PACKAGE / "detectors"):
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 250, path.name
        for window in set(six_lines(source)):
            assert window not in windows, (
                f"{path.name} and {windows[window]} share these lines: call the other detector's function, or move "
                f"the part to detectors/parts.py\n{window}"
            )
            windows[window] = path.name


def six_lines(source: str) -> Iterator[str]:
    """Yield every run of six lines, without blank lines, imports and lone brackets."""
    imports = {
        line
        for node in parsed(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = [text.strip() for number, text in enumerate(source.splitlines(), 1) if number not in imports]
    code = [text for text in lines if text.strip("()[]{},:")]
    yield from ("\n".join(code[start : start + 6]) for start in range(len(code) - 5))


def test_public_names_are_unique() -> None:
    """A public class, function or constant has a name of its own, apart from ``main`` of the commands."""
    owners: dict[str, set[str]] = {}
    for path in python_files(PACKAGE, ROOT / "ops"):
        for node in parsed(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            is_variable = isinstance(node, ast.Assign) and "TypeVar(" in ast.unparse(node.value)
            for name in names if not is_variable else ():
                if not name.startswith("_") and name not in ("logger", "main", "P"):
                    owners.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    assert len(owners) > 500
    assert not {name: sorted(paths) for name, paths in owners.items() if len(paths) > 1}


def reading_paths() -> dict[str, list[str]]:
    """Return the files of each table of CONTRIBUTING's reading guide, by the sentence above it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    guide = text.partition("## Reading guide")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    sentence = ""
    for part in guide.split("\n\n"):
        if part.startswith("|"):
            found[sentence] = list(dict.fromkeys(re.findall(r"`(detr_bf/[a-z0-9_/]+\.py)`", part)))
        else:
            sentence = part.strip()
    return found


def test_numbers_of_the_reading_guide_are_those_counted() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading guide")[2]
    paths = reading_paths()
    assert len(paths) == 2
    for sentence, names in paths.items():
        assert sentence.endswith(f"in {len(names)} files:")
    assert sum(map(len, paths.values())) == guide.count("\n| `detr_bf/"), "one row for each file"
    assert f"{len(ORDER)} folders and modules with {max(levels(folder_graph()).values())} levels of imports" in guide


if __name__ == "__main__":
    graph = folder_graph()
    print(f"{len(ORDER)} folders and modules, {max(levels(graph).values())} levels of imports")
    files = [*python_files(PACKAGE), *python_files(ROOT / "ops", ROOT / "tools", ROOT / "benchmarks")]
    print(f"{len(files)} files, {sum(len(path.read_text(encoding='utf-8').splitlines()) for path in files):,} lines")
    for sentence, names in reading_paths().items():
        lines = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in names)
        print(f"{sentence} {len(names)} files, {lines:,} lines")
