"""Example of CONTRIBUTING: a module of somebody's own between images, as arms of a comparison."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from detr_bf.batchformer import BATCH_MIXERS, InsertedBatchFormer
from detr_bf.commands import main
from detr_bf.common import extensions
from detr_bf.comparison.experiment import read_experiment
from detr_bf.engine import load_checkpoint
from detr_bf.tasks import task_of
from tests.docs.test_pages import ROOT
from tests.tools.conftest import tiny  # noqa: F401

TITLE = "## A module between images as an arm of a comparison"
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(TITLE)[2].partition("\n## ")[0]
ARMS = ["off", "attention", "context", "context_alone", "queries", "queries_alone"]


@pytest.fixture
def experiment(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Write both files of the section, with the data of the tests; return the experiment file."""
    monkeypatch.setattr(extensions, "_named", {})
    [code], [settings] = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "context.py").write_text(code)
    path = tmp_path / "context.yaml"
    path.write_text(settings.replace("base: bccd_deformable", f"base: {tiny}"))
    monkeypatch.chdir(tmp_path)
    return path


def test_the_example_is_about_50_lines() -> None:
    lines = [
        line for block in re.findall(r"```(?:python|yaml)\n(.*?)```", SECTION, re.DOTALL) for line in block.split("\n")
    ]
    assert sum(bool(line.strip()) for line in lines) <= 50


def test_every_arm_is_built_with_the_module(experiment: Path) -> None:
    found = read_experiment(experiment)
    assert list(found.configs) == ARMS
    for arm, config in found.configs.items():
        task = task_of(config)
        task.check_settings()
        modules = [each for each in task.build_model(3).modules() if isinstance(each, InsertedBatchFormer)]
        kinds = [type(mixer).__name__ for module in modules for mixer in module.mixers.values()]
        assert kinds == {"off": [], "attention": ["BatchFormerLayer"]}.get(arm, ["Context"])
    assert "context" not in BATCH_MIXERS, "nothing stays registered"


def test_the_module_is_a_batch_mixer() -> None:
    """Gradients cross images, and padding neither counts nor changes."""
    [code] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    names: dict[str, type[nn.Module]] = {}
    exec(code.replace('@BATCH_MIXERS.register("context")\n', ""), names)
    torch.manual_seed(0)
    mixer = names["Context"](8, heads=2, dropout=0.0, num_layers=2)
    tokens = torch.randn(3, 4, 8).requires_grad_()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = mask[:, 3] = True
    mixed = mixer(tokens, mask, None)
    assert torch.equal(mixed[mask], tokens[mask])
    mixed[0].sum().backward()
    crossed = tokens.grad[1:].abs().sum(-1) > 0
    assert crossed.tolist() == [[True, True, False, False], [True, True, True, False]]


@pytest.mark.full
@pytest.mark.parametrize("arm", ["context", "queries"])
def test_an_arm_is_trained(arm: str, experiment: Path, tmp_path: Path) -> None:
    found = read_experiment(experiment, ["train.max_steps=2", "train.batch_size=4", "eval.pictures=0"])
    cell = next(cell for cell in found.cells() if cell.arm == arm)
    run = tmp_path / "run"
    assert main(["train", *map(str, found.base), *found.overrides(cell), f"output_dir={run}"]) == 0
    weights = load_checkpoint(run / "last.pt").model
    part = "decoder" if arm == "queries" else "encoder"
    assert f"{part}.batch_former.mixers.shared.scores.0.weight" in weights


@pytest.mark.slow
def test_the_example_is_compared(experiment: Path, tmp_path: Path) -> None:
    assert main(["compare", "run", str(experiment), "--quick", "--output", str(tmp_path / "out")]) == 0
    comparison = (tmp_path / "out-quick" / "comparison.json").read_text()
    assert all(f'"{arm}"' in comparison for arm in ARMS)
