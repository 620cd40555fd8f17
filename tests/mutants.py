"""Measure which faults the tests find: change one line of the code, run the tests that execute it, count failures.

    pip install pytest-cov
    python tests/mutants.py cover             # run the tests of TESTS, record which test executes which line
    python tests/mutants.py run --count 150   # change a copy of the project, one place at a time

``run`` draws the same number of places in each part of :data:`PARTS`, among the lines of functions that a test
executes. It tries the fastest case of each test function that executes the line, then all cases of the default tier of
these functions, then those of ``make test-full``. The result is
``build/mutants/results.json``. The change is made in a copy of the project, never in the checkout itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
PARTS = {
    "core": ("batchformer", "transformer", "detectors", "losses"),
    "engine": ("engine",),
    "data": ("data",),
    "evaluation": ("evaluation",),
    "export": ("export",),
}
FOLDERS = [folder for folders in PARTS.values() for folder in folders]
TESTS = [*FOLDERS, "golden"]  # folders of tests; the last compares with recorded outputs of the reference models
MOST_TESTS = 40  # test functions of a line that are tried with their fastest case, the fastest first
MOST_SECONDS = 20.0  # of a test that is tried, as measured with coverage; the 5 fastest are tried in any case
SECONDS = 900  # limit of one run of tests on a busy machine; a change that makes them hang is found

_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_COMPARE |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
_BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
_BINARY |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}


class Mutant(NamedTuple):
    """Change of one expression or statement."""

    part: str
    file: str  # below the root of the project
    line: int
    begin: int  # characters before the expression in its file
    end: int
    before: str
    after: str


def mutants_of(part: str, file: str, source: str, covered: set[int]) -> Iterator[Mutant]:
    """Yield the possible changes on covered lines of functions, except in messages of errors and in assertions."""
    lines = source.splitlines(keepends=True)
    # ast counts bytes, and the text is cut by characters
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    for function in functions:
        for node in (each for statement in function.body for each in _inside(statement)):
            if node.lineno not in covered or node.end_lineno is None or node.end_col_offset is None:
                continue
            before = ast.get_source_segment(source, node)
            after = _changed(node)
            if before and after and after != before:
                begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
                assert source[begin:end] == before
                yield Mutant(part, file, node.lineno, begin, end, before, after)


def _inside(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.AnnAssign)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # docstring
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _inside(child)


def _changed(node: ast.expr | ast.stmt) -> str | None:
    """Return the text of another program at the place of ``node``, or None."""
    new: ast.AST | None = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        new = ast.Compare(node.left, [_COMPARE[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        new = ast.BinOp(node.left, _BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        new = ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        new = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        new = ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        new = ast.IfExp(node.test, node.orelse, node.body)
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
        return "pass"
    elif isinstance(node, ast.Continue):
        return "break"
    if new is None:
        return None
    text = ast.unparse(ast.fix_missing_locations(new))
    return f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else text


def cover() -> None:
    """Run the tests of the default tier in :data:`TESTS` and store the tests of each line."""
    BUILD.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"COVERAGE_FILE": str(BUILD / "coverage"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--cov=detr_bf", "--cov-report="]
    command += ["--cov-context=test", f"--junitxml={BUILD / 'junit.xml'}", *(f"tests/{name}" for name in TESTS)]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def tests_of_lines() -> dict[str, dict[int, list[str]]]:
    """Return the tests that execute each line, the fastest first, by file below the root."""
    from coverage import CoverageData  # only this script needs it

    seconds: dict[str, float] = {}
    for case in ElementTree.parse(BUILD / "junit.xml").iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        passed = not {child.tag for child in case} & {"failure", "error", "skipped"}
        if passed:
            seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    data = CoverageData(basename=str(BUILD / "coverage"))
    data.read()
    found: dict[str, dict[int, list[str]]] = {}
    for path in data.measured_files():
        by_line: dict[int, list[str]] = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            tests = {context.rpartition("|")[0] for context in contexts} & seconds.keys()
            if tests:
                cases: dict[str, str] = {}  # by function
                for test in sorted(tests, key=seconds.__getitem__):
                    cases.setdefault(test.partition("[")[0], test)
                fastest = sorted(cases.values(), key=seconds.__getitem__)
                by_line[line] = [
                    test for place, test in enumerate(fastest) if place < 5 or seconds[test] < MOST_SECONDS
                ][:MOST_TESTS]
        found[Path(path).relative_to(ROOT).as_posix()] = by_line
    return found


def draw(count: int, seed: int, covering: dict[str, dict[int, list[str]]]) -> list[Mutant]:
    """Draw ``count`` changes, the same number in each part."""
    chosen = random.Random(seed)
    drawn = []
    for part, folders in PARTS.items():
        every = [
            mutant
            for file, lines in sorted(covering.items())
            if file.split("/")[1] in folders
            for mutant in mutants_of(part, file, (ROOT / file).read_text(encoding="utf-8"), set(lines))
        ]
        drawn += chosen.sample(every, count // len(PARTS))
    return drawn


def run(count: int, seed: int, processes: int) -> None:
    """Try every drawn change and write ``results.json`` after each of them."""
    covering = tests_of_lines()
    drawn = draw(count, seed, covering)
    copies: Queue[Path] = Queue()
    shared, link = ROOT.parent / "shared", BUILD / "shared"  # recorded outputs of the reference models
    if shared.is_dir() and not link.exists():
        link.symlink_to(shared)
    for number in range(processes):
        copy = BUILD / f"copy{number}"
        shutil.rmtree(copy, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", ".cache", "__pycache__", ".*_cache", ".gpu")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        copies.put(copy)
    results: list[dict[str, object]] = []

    def attempt(mutant: Mutant) -> None:
        copy = copies.get()
        try:
            tests = covering[mutant.file][mutant.line]
            functions = sorted({test.partition("[")[0] for test in tests})
            tries = (tests, "default"), (functions, "default"), (functions, "full")
            options = {"default": ["-m", "not slow and not full"], "full": ["-m", "full and not slow"]}
            found_by = next((tier for chosen, tier in tries if found(copy, mutant, chosen, options[tier])), None)
            results.append(mutant._asdict() | {"tests": len(tests), "found_by": found_by})
            (BUILD / "results.json").write_text(json.dumps(results, indent=1))
            print(f"{len(results)}/{len(drawn)} {found_by or 'NOT FOUND'} {mutant.file}:{mutant.line}", flush=True)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(attempt, drawn))
    for part in PARTS:
        of_part = [result["found_by"] for result in results if result["part"] == part]
        default, full = of_part.count("default"), of_part.count("full")
        print(f"{part}: {default} of {len(of_part)} found by the default tier, {default + full} by all tests")


def found(copy: Path, mutant: Mutant, tests: list[str], options: list[str]) -> bool:
    """Return whether a test fails, or does not end, with the change."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source[: mutant.begin] + mutant.after + source[mutant.end :], encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        # 4: wrong arguments, such as a test that does not exist; or a file of tests cannot be imported
        broken = any(text in ended.stderr for text in ("while loading conftest", "found no collectors"))
        assert ended.returncode != 4 or broken, ended.stderr
        return ended.returncode not in (0, 5)  # 5: no test was selected
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("cover", "run"))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.action == "cover":
        cover()
    else:
        run(arguments.count, arguments.seed, arguments.processes)
