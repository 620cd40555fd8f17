"""Package layout and the compiled operators; everything else stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from build import BuildError, build  # ops/build.py, which needs nothing installed


class BuildOperators(build_ext):
    """Compile with ops/build.py; an installation without compiler or torch succeeds, and says what runs instead."""

    def run(self) -> None:
        package = Path("ops") if self.inplace or self.editable_mode else Path(self.build_lib, "detr_bf", "ops")
        for name, result in build(package / "compiled").items():
            print(f"detr_bf.ops, {name}: {'not built: ' if isinstance(result, BuildError) else ''}{result}")

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib, "detr_bf", "ops", "compiled")
        return [str(path) for path in folder.glob("*") if path.is_file()]


setup(
    packages=[*find_packages(include=["detr_bf", "detr_bf.*"]), "detr_bf.ops", "detr_bf.configs"],
    package_dir={"detr_bf.ops": "ops", "detr_bf.configs": "configs"},
    package_data={
        "detr_bf": ["py.typed"],
        "detr_bf.report": ["page.css", "page.js"],
        "detr_bf.configs": ["*.yaml", "*/*.yaml", "*/*/*.yaml", "detectron2/lazy/*.py"],
        "detr_bf.ops": ["csrc/*.*", "csrc/*/*.*"],
    },
    ext_modules=[Extension("detr_bf.ops.compiled", sources=[], optional=True)],  # a wheel with it is of one platform
    cmdclass={"build_ext": BuildOperators},
)
