"""Allowed imports between the packages of ``detr_bf``, and the longest functions and files.

A package here is a module or package directly under ``detr_bf``, or one of ``NESTED``. Imports point down only; a
package missing from the table fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "detr_bf"
OUTSIDE = {"tools", "tests", "benchmarks"}  # they import the package, never the reverse

GROUND = {
    "errors",
    "text",
    "extensions",
    "devices",
    "distributed",
    "structures",
    "files",
    "boxes",
    "progress",
    "malloc",
}
MODEL = {"ops", "batchformer", "layers", "backbones", "transformer", "detectors"}
WORK = {"losses", "data", "postprocess", "evaluation", "report"}

# From the bottom up. Only `assembly` turns configs into objects; nothing below it knows foreign checkpoints.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "text": set(),
    "extensions": {"errors", "text"},
    "devices": set(),
    "distributed": {"errors", "text"},
    "structures": {"errors", "text"},
    "files": {"errors", "text"},
    "boxes": {"errors", "text"},
    "progress": {"distributed", "text"},
    "timing": set(),
    "malloc": set(),
    "cli": {"errors", "text", "distributed", "progress"},
    "config": {"errors", "text", "extensions"},  # and no torch
    "ops": set(),  # outside the folder of the package, torch only
    "batchformer": {"errors", "extensions", "distributed", "structures", "ops"},
    "layers": {"devices", "errors", "ops"},
    "downloads": {"errors", "text", "files", "progress"},
    "hub": {"errors", "text"},
    "published": {"errors", "text", "files", "downloads", "hub"},
    "backbones": {"errors", "text", "structures", "files", "layers"},
    "transformer": {"devices", "errors", "structures", "boxes", "batchformer", "layers"},
    "detectors": {
        "devices",
        "errors",
        "structures",
        "boxes",
        "ops",
        "batchformer",
        "layers",
        "backbones",
        "transformer",
    },
    "losses": {"devices", "errors", "extensions", "distributed", "structures", "boxes"},
    "plugins": {
        "devices",
        "errors",
        "distributed",
        "structures",
        "ops",
        "batchformer",
        "layers",
        "transformer",
        "losses",
    },
    "data": GROUND,
    "postprocess": {
        "errors",
        "distributed",
        "structures",
        "boxes",
        "losses",
    },  # reading of scores depends on the classification loss
    "evaluation": GROUND | {"data", "postprocess"},
    "report": GROUND | {"config", "data", "postprocess", "evaluation"},  # it describes the config of a finished run
    "engine": GROUND | MODEL | WORK,
    "interop": {"errors", "text", "structures", "files"},
    "prediction": GROUND | WORK,
    "tiling": GROUND | WORK,
    "sharing": GROUND | WORK | {"engine", "interop"},
    "transformers_folder": GROUND | MODEL | {"interop"},
    "export": GROUND | MODEL | WORK | {"sharing"},
    "predictor": GROUND | MODEL | WORK | {"prediction", "tiling", "sharing", "hub", "transformers_folder", "export"},
    "serving": {"errors", "text", "data", "prediction", "predictor"},
    "classification": GROUND | MODEL | WORK | {"plugins", "config", "engine", "predictor", "prediction"},
    "assembly": GROUND
    | MODEL
    | WORK
    | {"plugins", "classification", "config", "engine", "interop"}
    | {"published", "sharing"},
    "exported_predictor": GROUND | WORK | {"config", "assembly", "export", "predictor"},
    "conversion": {"errors", "files", "structures", "interop"},
    "planning": GROUND | MODEL | WORK | {"config", "engine", "interop", "assembly"},
    "tasks": GROUND
    | MODEL
    | WORK
    | {"plugins", "classification", "config", "engine", "interop", "assembly", "conversion", "predictor", "sharing"}
    | {"planning"},
    "replay": {"errors", "text", "devices", "config", "engine", "assembly", "tasks"},
    "run": {"errors", "text", "distributed", "files", "progress", "config", "engine", "report", "assembly", "tasks"}
    | {"devices", "published", "malloc"},
    "analysis": GROUND | MODEL | WORK | {"plugins", "classification", "config", "engine", "assembly", "tasks"},
    "comparison": GROUND | {"config", "data", "evaluation", "report", "engine", "tasks"},
    "models": {"errors", "text", "config", "data", "detectors", "engine", "assembly", "predictor", "sharing", "tasks"}
    | {"classification", "files", "hub", "interop", "published", "transformers_folder", "export", "exported_predictor"},
    "finetuning": {"errors", "text", "config", "data", "assembly", "models", "predictor", "progress", "run", "tasks"},
    "commands": GROUND
    | WORK
    | {"cli", "plugins", "classification", "config", "engine", "interop", "assembly", "conversion", "predictor"}
    | {"prediction", "tasks", "replay", "run", "planning", "analysis", "comparison", "models", "tiling"}
    | {"finetuning", "hub", "published", "serving", "export", "exported_predictor", "timing"},
    "__init__": {
        "models",
        "predictor",
        "prediction",
        "finetuning",
        "classification",
        "published",
        "extensions",
    },  # the public names, imported on first use
    "__main__": {"commands"},
    "interop/detectron2": GROUND
    | MODEL
    | WORK
    | {"cli", "config", "engine", "interop", "assembly", "models"},  # no other package may import it
}
NESTED = {"interop/detectron2"}
FORBIDDEN_LIBRARIES = {"config": {"torch", "torchvision", "timm"}}

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import in ``source``, a file of ``package`` (for relative imports)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*ancestors, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def package_of(parts: Sequence[str]) -> str:
    """Return the package of a module, given by its folders and its name below ``detr_bf``."""
    deeper = "/".join(parts[:2])
    return deeper if deeper in NESTED else parts[0]


def forbidden_imports(source: str, path: str) -> list[str]:
    """Report each import that ``path`` (relative to the package, ``data/coco.py``) may not have."""
    parts = Path(path).with_suffix("").parts
    owner, package = package_of(parts), ".".join(("detr_bf", *parts[:-1]))
    if owner not in ALLOWED:
        return [f"detr_bf/{path}: the package '{owner}' has no line in ALLOWED of tests/test_architecture.py: add one"]
    found = []
    for line, name in imported_names(source, package):
        top, *rest = name.split(".")
        where = f"detr_bf/{path}:{line}"
        if top in OUTSIDE:
            found.append(f"{where}: the package must not import {top}")
        elif top in FORBIDDEN_LIBRARIES.get(owner, ()):
            found.append(f"{where}: '{owner}' must work without {top}")
        elif top == "detr_bf" and (not rest or package_of(rest) not in ALLOWED[owner] | {owner}):
            allowed = ", ".join(sorted(ALLOWED[owner])) or "nothing of ours"
            found.append(f"{where}: '{owner}' must not import {name}; it may import {allowed}")
    return found


def too_long(source: str, path: str) -> list[str]:
    """Report the file and each of its functions if longer than allowed."""
    lines = len(source.splitlines())
    found = [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
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
    assert {"structures.py", "ops/library.py"} <= {name for _, name in files}
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
        tree = ast.parse(path.read_text(encoding="utf-8"))
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


def test_the_table_has_no_cycle() -> None:
    order = list(ALLOWED)
    for owner, below in ALLOWED.items():
        assert below <= set(order[: order.index(owner)]), (
            f"'{owner}' may only import packages that stand above it in ALLOWED"
        )


@pytest.mark.parametrize(
    ("path", "source", "culprit"),
    [
        ("losses/matcher.py", "from detr_bf.engine.loop import train", "detr_bf.engine.loop.train"),
        ("layers/mlp.py", "from ..structures import Batch", "detr_bf.structures.Batch"),
        ("engine/loop.py", "import detr_bf.assembly as b", "detr_bf.assembly"),
        ("engine/loop.py", "def f():\n    from detr_bf import config", "detr_bf.config"),
        ("postprocess.py", "import detr_bf", "detr_bf"),
        ("data/coco.py", "import os, tools.train_net", "tools"),
        ("config/detection.py", "import torch.nn as nn", "torch"),
        ("novelty/x.py", "import os", "novelty"),
        ("assembly/run.py", "from detr_bf.interop.detectron2 import recipe", "detr_bf.interop.detectron2.recipe"),
        ("interop/formats.py", "import detr_bf.interop.detectron2.config", "detr_bf.interop.detectron2.config"),
        ("interop/detectron2/x.py", "from detr_bf.run import train", "detr_bf.run.train"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, culprit: str) -> None:
    [sentence] = forbidden_imports(source, path)
    assert path in sentence
    assert culprit in sentence


def test_allowed_imports_pass() -> None:
    source = (
        "import torch\n"
        "from detr_bf import boxes\n"
        "from detr_bf.losses.giou import giou_loss\n"
        "from .matcher import match\n"
        "from ..structures import Target\n"
        "import torchdetr_bf\n"
    )
    assert forbidden_imports(source, "losses/set_criterion.py") == []
    assert forbidden_imports("from .engine import x", "postprocess.py") != []


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
                f"the part to detectors/detector.py\n{window}"
            )
            windows[window] = path.name


def six_lines(source: str) -> Iterator[str]:
    """Yield every run of six lines, without blank lines, imports and lone brackets."""
    imports = {
        line
        for node in ast.parse(source).body
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
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
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
