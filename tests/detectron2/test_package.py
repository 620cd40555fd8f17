"""Lazy imports of the package: clear errors without detectron2, and nothing else of detr_bf imports it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import detr_bf
from detr_bf import detectron2

PACKAGE = Path(detr_bf.__file__).parent

NO_DETECTRON2 = """
import importlib.util, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "detectron2":
            raise ImportError("hidden")
sys.meta_path.insert(0, Gone())
whole = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "detectron2" else whole(name, *rest)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.full
def test_importing_every_module_of_ours_never_imports_detectron2() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if "detectron2" not in path.parts
    ]
    code = f"import sys\nfrom importlib import import_module\nfor name in {modules}: import_module(name)\n"
    ended = run(code + "assert not any(n.partition('.')[0] in ('detectron2', 'fvcore', 'yacs') for n in sys.modules)")
    assert ended.returncode == 0, ended.stderr


def test_without_detectron2_the_error_names_the_install_guide() -> None:
    ended = run(NO_DETECTRON2 + "from detr_bf.detectron2 import add_detr_bf_config")
    assert ended.returncode == 1
    assert "ImportError: detr_bf.detectron2.add_detr_bf_config needs detectron2" in ended.stderr
    assert detectron2.INSTALL_GUIDE in ended.stderr


@pytest.mark.parametrize("tool", ["d2_train_net", "d2_lazy_train_net"])
def test_without_detectron2_the_tools_end_with_one_line(tool: str) -> None:
    code = f"sys.path.insert(0, {str(PACKAGE.parent / 'tools')!r})\nimport {tool}\nsys.exit({tool}.main([]))"
    ended = run(NO_DETECTRON2 + code)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: detr_bf.detectron2.train_")
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_of_the_name_is_no_installation(tmp_path: Path) -> None:
    (tmp_path / "detectron2").mkdir()
    code = f"""
import sys
from pathlib import Path
installed = [path for path in sys.path if not (Path(path) / "detectron2").is_dir()]
sys.path[:] = [{str(tmp_path)!r}, *installed]
from detr_bf.detectron2 import DetrBfTrainer
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert f"see {detectron2.INSTALL_GUIDE}" in ended.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'novelty'"):
        detectron2.novelty  # noqa: B018


def test_every_public_name_is_in_its_module() -> None:
    folder = PACKAGE / "detectron2"
    for name, module in detectron2._MODULES.items():
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        assert any(getattr(node, "name", None) == name for node in tree.body), f"{module}.py has no {name}"
