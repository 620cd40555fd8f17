"""The files of ``configs/``: all load, state a difference, build, and are listed in docs/recipes.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from detr_bf.assembly.classifier import build_classifier
from detr_bf.assembly.masked import build_masked_autoencoder
from detr_bf.config import ClassifierConfig, DetectionConfig, MaskedConfig, RunConfig, known_keys, load_config
from detr_bf.errors import InputError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GUIDE = (ROOT / "docs" / "recipes.md").read_text()
SCHEMAS: dict[str, type[RunConfig]] = {  # by folder; all others hold detectors
    "classification": ClassifierConfig,
    "experiments": ClassifierConfig,
    "masked": MaskedConfig,
}
FILES = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml") if "detectron2" not in path.parts
)
RECIPES = [
    name for name in FILES if "/" in name and "base" not in Path(name).parts and not name.startswith("experiments/")
]
CLASSIFIERS = [name for name in RECIPES if name.startswith("classification/")]
MASKED = [name for name in RECIPES if name.startswith("masked/")]
NUM_CLASSES = 10


@cache
def load(name: str) -> Any:
    """A config of its task's type, the same object every time."""
    return load_config(CONFIGS / name, schema=SCHEMAS.get(name.split("/")[0], DetectionConfig))


def base_of(name: str) -> str:
    """The file that a recipe inherits."""
    tree = yaml.safe_load((CONFIGS / name).read_text())
    return (CONFIGS / name).parent.joinpath(tree["base"]).resolve().relative_to(CONFIGS).as_posix()


def settings(name: str) -> dict[str, Any]:
    """All settings by their full key."""
    return {key: reduce(getattr, key.split("."), load(name)) for key in known_keys(type(load(name)))}


def changes(name: str) -> set[str]:
    """Keys that a recipe sets to another value than what it inherits."""
    own, inherited = settings(name), settings(base_of(name))
    return {key for key in own if own[key] != inherited[key]}


def plug_ins(name: str) -> set[str]:
    """The plug-ins that a classifier's recipe has on."""
    enabled = (re.fullmatch(r"plugins\.(\w+)\.enabled", key) for key, value in settings(name).items() if value is True)
    return {found[1] for found in enabled if found}


def comment(name: str) -> str:
    """The comment that heads a file, as one line."""
    lines = (CONFIGS / name).read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def rows() -> Iterator[tuple[str, str]]:
    """Recipes of classifiers in the tables of docs/recipes.md, each with its number."""
    for line in GUIDE.splitlines():
        names = [name for name in re.findall(r"`([\w/.]+\.yaml)`", line) if name.split("/")[0] in SCHEMAS]
        if line.startswith("|") and names:
            number = re.search(r"\| (\d+\.\d+) \|", line)
            assert number, f"no number in: {line}"
            yield from ((name, number[1]) for name in names)


@pytest.mark.parametrize("name", FILES)
def test_every_file_loads(name: str) -> None:
    assert type(load(name)) is SCHEMAS.get(name.split("/")[0], DetectionConfig)


@pytest.mark.parametrize("name", [name for name in FILES if name.split("/")[0] in SCHEMAS])
def test_a_tool_of_another_task_names_the_right_one(name: str) -> None:
    with pytest.raises(InputError, match=r"use tools/(train_classifier|pretrain_mae)\.py"):
        load_config(CONFIGS / name)


def test_there_are_recipes_of_every_task() -> None:
    assert len(CLASSIFIERS) > 70
    assert len(MASKED) == 4
    assert len(RECIPES) - len(CLASSIFIERS) - len(MASKED) > 30


def test_no_two_recipes_share_a_name() -> None:
    stems = [Path(name).stem for name in RECIPES]
    assert len(stems) == len(set(stems))


@pytest.mark.parametrize("name", CLASSIFIERS + MASKED)
def test_a_recipe_inherits_and_writes_to_a_folder_of_its_own_name(name: str) -> None:
    assert (CONFIGS / base_of(name)).is_file()
    assert load(name).output_dir == f"runs/{Path(name).stem}"


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS + MASKED if base_of(name) in RECIPES])
def test_a_recipe_on_another_recipe_states_a_difference(name: str) -> None:
    assert changes(name) - {"output_dir"}


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if plug_ins(name) and not plug_ins(base_of(name))])
def test_a_plug_in_is_all_that_parts_a_row_from_its_baseline(name: str) -> None:
    """But for DiversePatch, whose mixing excludes repeated augmentation where the baseline has it."""
    (plugin,) = plug_ins(name)
    others = {key for key in changes(name) if not key.startswith(f"plugins.{plugin}.")} - {"output_dir"}
    config = load(name)
    mixes = plugin == "diverse_patch" and config.plugins.diverse_patch.mixing
    repeated = load(base_of(name)).data.repeats > 1
    assert others == ({"data.repeats"} if mixes and repeated else set())


def in_guide(name: str) -> bool:
    return f"{Path(name).name}`" in GUIDE


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_listed_in_the_guide(name: str) -> None:
    """A config without a published number, in a new folder, need not be listed."""
    folder = {other for other in RECIPES if Path(other).parent == Path(name).parent}
    assert in_guide(name) or not ("Published:" in comment(name) or any(map(in_guide, folder)))


def test_every_file_of_the_guide_exists() -> None:
    assert {name for name, _ in rows()} == {*CLASSIFIERS, *MASKED}


@pytest.mark.parametrize(("name", "number"), sorted(set(rows())))
def test_guide_and_recipe_give_the_same_number(name: str, number: str) -> None:
    """Pre-training has none of its own: it names the probe that has."""
    head = comment(name)
    probe = re.search(r"configs/(classification/\S+_probe\.yaml)", head)
    published = comment(probe[1]) if name in MASKED and probe else head
    assert number in published.partition("Published: ")[2]


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if name.endswith("_probe.yaml")])
def test_a_linear_probe_starts_from_the_pre_training_of_its_name(name: str) -> None:
    before = load(name.replace("classification/", "masked/").replace("_probe.yaml", ".yaml"))
    probe = load(name)
    assert probe.init_from == before.output_dir
    assert probe.model.name == before.model.name
    assert probe.model.linear_probe


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_builds_with_its_plug_ins(name: str) -> None:
    config = load(name)
    with torch.device("meta"):
        network = build_classifier(config, NUM_CLASSES, pretrained=False)
    assert set(getattr(network, "plugins", nn.ModuleDict())) == plug_ins(name)


@pytest.mark.parametrize("name", MASKED)
def test_every_masked_autoencoder_builds(name: str) -> None:
    config = load(name)
    with torch.device("meta"):
        model = build_masked_autoencoder(config)
    assert len(model.decoder.layers) == config.model.decoder_depth
    assert (model.decoder.batch_former is not None) == config.batch_former.enabled


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("classification/deit/deit_small.yaml", 22.1),
        ("classification/batchformer/resnet10_imagenet_lt.yaml", 5.4),
        ("classification/batchformer/resnet152_places_lt.yaml", 60.2),
        ("classification/diverse_patch/deit_base24.yaml", 171.6),
        ("classification/relative_localization/swin_tiny_infograph.yaml", 28.3),
        ("classification/diverse_patch/swin_base_dp.yaml", 88.8),
    ],
)
def test_networks_are_as_large_as_the_papers(name: str, millions: float) -> None:
    """With the 1,000 classes of ImageNet."""
    config = load(name)
    with torch.device("meta"):
        network = build_classifier(config, 1000, pretrained=False)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_an_installation_has_every_file() -> None:
    patterns = re.findall(r'"([*a-z0-9/]+\.(?:yaml|py))"', (ROOT / "setup.py").read_text())
    assert patterns
    installed = {path for pattern in patterns for path in CONFIGS.glob(pattern)}
    assert installed == {*CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("lazy/*.py")}
