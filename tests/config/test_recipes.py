"""Files of ``configs/`` and command lines of docs/recipes.md: all load, build, differ and match their rows."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import nn

from detr_bf.assembly.data import augmented_epochs
from detr_bf.assembly.model import build_classification
from detr_bf.assembly.training import learning_rate
from detr_bf.classification.assembly import build_classifier, build_contrastive, build_masked_autoencoder
from detr_bf.common.errors import InputError
from detr_bf.config import config_to_dict, known_keys, load_config, packaged_configs, packaged_experiments, schema_of
from detr_bf.losses import MatchabilityAware
from detr_bf.segmentation.assembly import build_segmenter

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GUIDE = (ROOT / "docs" / "recipes.md").read_text()
TASKS = {
    "classification": "classification",
    "contrastive": "contrastive_learning",
    "experiments": "classification",
    "masked": "masked_autoencoding",
    "segmentation": "segmentation",
}
FILES = sorted(
    path.relative_to(CONFIGS).as_posix()
    for path in CONFIGS.rglob("*.yaml")
    if not {"detectron2", "compare"} & {*path.parts}  # the latter are experiments, not configs
)
RECIPES = [
    name for name in FILES if "/" in name and "base" not in Path(name).parts and not name.startswith("experiments/")
]
NUM_CLASSES = 10


class Row(NamedTuple):
    """Row of a table with a command."""

    label: str  # first cell, below the head of its column
    path: str  # in configs/
    settings: tuple[str, ...]
    number: str  # published value; empty if there is none

    def __str__(self) -> str:
        return " ".join([Path(self.path).stem, *self.settings])


def rows() -> Iterator[Row]:
    """Parse the tables of docs/recipes.md."""
    folder = head = ""
    for line in GUIDE.splitlines():
        if not line.startswith("|"):
            folder = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found := re.fullmatch(r"`python tools/train_net\.py --config configs/([\w/]*)`", cells[1]):
            folder, head = found[1] or "./", cells[0]
        elif folder and (command := re.fullmatch("`(.+)`", cells[1])):
            name, *settings = shlex.split(command[1])
            path = (CONFIGS / folder / name).resolve().relative_to(CONFIGS).as_posix()
            yield Row(f"{head}: {cells[0]}", path, tuple(settings), cells[2] if len(cells) > 2 else "")


ROWS = list(rows())
CLASSIFIERS = [row for row in ROWS if row.path.startswith("classification/")]
MASKED = [row for row in ROWS if row.path.startswith("masked/")]
CONTRASTIVE = [row for row in ROWS if row.path.startswith("contrastive/")]
PRETRAINED = MASKED + CONTRASTIVE


@cache
def load(path: str, *settings: str) -> Any:
    """Return a config, the same object for the same arguments."""
    return load_config(CONFIGS / path, settings)


@cache
def values(row: Row) -> dict[str, Any]:
    """Return all settings of a row but output_dir, by full key."""
    config = load(row.path, *row.settings)
    return {key: reduce(getattr, key.split("."), config) for key in known_keys(type(config)) if key != "output_dir"}


@cache
def plug_ins(row: Row) -> set[str]:
    """Return the enabled plug-ins of a classifier."""
    enabled = (re.fullmatch(r"plugins\.(\w+)\.enabled", key) for key, value in values(row).items() if value is True)
    return {found[1] for found in enabled if found}


def comment(path: str) -> str:
    """Return the comment at the head of a file as one line."""
    lines = (CONFIGS / path).read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def depth(path: Path) -> int:
    """Return the number of files in the longest chain of inheritance."""
    bases = yaml.safe_load(path.read_text()).get("base", [])
    return 1 + max((depth(path.parent / base) for base in ([bases] if isinstance(bases, str) else bases)), default=0)


def test_every_file_loads() -> None:
    for name in FILES:
        assert type(load(name)) is schema_of(TASKS.get(name.split("/")[0], "detection")), name


def test_inheritance_is_at_most_three_files_deep() -> None:
    for name in FILES:
        assert depth(CONFIGS / name) <= 3, name


def test_a_file_of_another_task_is_refused() -> None:
    for name in (name for name in FILES if name.split("/")[0] in TASKS):
        with pytest.raises(InputError, match=r"but a config of the task detection is expected; detr-bf train"):
            load_config(CONFIGS / name, task="detection")


def test_there_are_recipes_of_every_task() -> None:
    assert len(CLASSIFIERS) > 70
    assert len(MASKED) == 4
    assert len(CONTRASTIVE) == 3
    assert len(ROWS) - len(CLASSIFIERS) - len(PRETRAINED) > 30


def test_no_two_recipes_share_a_name() -> None:
    stems = [Path(name).stem for name in RECIPES]
    assert len(stems) == len(set(stems))


def test_a_recipe_writes_to_a_folder_of_its_own_name() -> None:
    for name in RECIPES:
        assert load(name).output_dir == f"runs/{Path(name).stem}", name


def test_every_recipe_is_a_row_of_the_guide() -> None:
    """A config without a published number, in a new folder, need not be listed."""
    listed = {row.path for row in ROWS if not row.settings}
    assert listed <= set(RECIPES)
    folders = {Path(name).parent for name in listed}
    assert not {name for name in RECIPES if "Published:" in comment(name) or Path(name).parent in folders} - listed


@pytest.mark.full
def test_no_two_rows_of_the_guide_train_the_same() -> None:
    found = [repr({**config_to_dict(load(row.path, *row.settings)), "output_dir": ""}) for row in ROWS]
    assert len(set(found)) == len(ROWS) == 302


def test_guide_and_recipe_give_the_same_number() -> None:
    for row in (row for row in ROWS if row.number and not row.settings):
        assert re.fullmatch(r"\d+\.\d+", row.number), row
        assert row.number in comment(row.path).partition("Published: ")[2], row


def test_pre_training_names_the_probe_that_has_its_number() -> None:
    for row in PRETRAINED:
        probe = re.search(r"configs/(classification/\S+_probe\.yaml)", comment(row.path))
        assert probe, row
        assert "Published: top-1" in comment(probe[1]), row


def former_of(config: Any) -> Any:
    """Return the settings of BatchFormerV2."""
    return config.plugins.batchformer_v2 if config.task == "classification" else config.batch_former


SIZES = {"Ti": "tiny", "T": "tiny", "S": "small", "B": "base", "L": "large"}
Check = Callable[[Any, re.Match[str]], bool]
STATED: dict[str, Check] = {  # parts of labels, and the settings they imply
    r"batch (\d+)": lambda config, found: config.train.batch_size == int(found[1]),
    r"(\d+) epochs": lambda config, found: config.train.epochs == int(found[1]),
    r"(\d+) pixels": lambda config, found: (
        vars(config.data.transforms)["square" if config.task == "detection" else "size"] == int(found[1])
    ),
    r"(\d+) layers": lambda config, found: config.plugins.batchformer.num_layers == int(found[1]),
    r"imbalance (\d+)": lambda config, found: config.data.long_tail.imbalance == int(found[1]),
    r"\bL(\d)\b(?:-(\d))?": lambda config, found: (
        config.batch_former.layers == list(range(int(found[1]) - 1, int(found[2] or found[1])))
    ),
    r"L.*, shared": lambda config, found: config.batch_former.shared,
    "non-shared": lambda config, found: not former_of(config).shared,
    r"blocks (\d+)-(\d+)": lambda config, found: (
        former_of(config).enabled and former_of(config).layers == [*range(int(found[1]) - 1, int(found[2]))]
    ),
    "classifier not shared": lambda config, found: not config.plugins.batchformer.shared_classifier,
    "single stream": lambda config, found: config.batch_former.mode == "single_stream",
    "refinement": lambda config, found: config.model.deformable.box_refine,
    "two-stage": lambda config, found: config.model.deformable.two_stage,
    "ResNet-101": lambda config, found: config.model.backbone.name == "resnet101",
    r"ResNet-(50|152)": lambda config, found: config.model.name == f"resnet{found[1]}",
    r"\b(DeiT|Swin|ViT)-(Ti|[TSBL])": lambda config, found: config.model.name.startswith(
        f"{found[1].lower()}_{SIZES[found[2]]}_"
    ),
    r"\b([SB])(12|24)\b": lambda config, found: (
        config.model.name == f"deit_{SIZES[found[1]]}_patch16_224"
        and config.model.options.get("depth", 12) == int(found[2])
    ),
    r"\+ BatchFormerV2": lambda config, found: (
        former_of(config).enabled or bool(config.init_from and config.init_from.endswith("_bfv2/last.pt"))
    ),
    r"\+ BatchFormer(?!V2)": lambda config, found: (
        config.batch_former.enabled
        if config.task == "contrastive_learning"
        else config.plugins.batchformer.enabled or bool(re.search("_bf(_trained)?/last.pt", config.init_from or ""))
    ),
    "BatchFormer, (frozen|trained)": lambda config, found: (
        config.batch_former.frozen == (found[1] == "frozen")
        if config.task == "contrastive_learning"
        else config.init_from.endswith("_bf/last.pt" if found[1] == "frozen" else "_bf_trained/last.pt")
    ),
    "RIDE": lambda config, found: config.model.experts == 3 and not config.plugins.batchformer.shared_classifier,
    r"\+ DiversePatch": lambda config, found: config.plugins.diverse_patch.enabled,
    r"\+ localization": lambda config, found: config.plugins.relative_localization.enabled,
    r"(?:B24|Swin-B), ((?:cosine|contrastive|mixing).*)": lambda config, found: all(
        bool(getattr(config.plugins.diverse_patch, loss)) == (loss in found[1])
        for loss in ("cosine", "contrastive", "mixing")
    ),
    r"(\d+) neurons": lambda config, found: config.plugins.relative_localization.hidden == int(found[1]),
    "`(signed|ce|reg|all)`": lambda config, found: config.plugins.relative_localization.variant == found[1],
    "all blocks, (front|mid|attention|both)": lambda config, found: (
        config.plugins.context_broadcasting.position == found[1]
    ),
    "longer warm-up": lambda config, found: config.optimizer.warmup_epochs == 20,
    r"(PiT)-B|(Mixer)-S/16": lambda config, found: config.model.name == ("pit_b_224" if found[1] else "mixer_s16_224"),
    "upper half": lambda config, found: config.plugins.context_broadcasting.layers == "upper",
    "all blocks|CB_S": lambda config, found: config.plugins.context_broadcasting.layers == "all",
    "CB_S": lambda config, found: config.plugins.context_broadcasting.scaled,
    "talking heads": lambda config, found: config.model.variant == "talking_heads",
    r"(?:uniform head|squeeze and excitation|extra attention|extra MLP)": lambda config, found: (
        config.model.variant == found[0].lower().replace("squeeze and", "squeeze").replace(" ", "_")
    ),
    r"wider (MLP|network)": lambda config, found: (
        ("mlp_ratio" if found[1] == "MLP" else "embed_dim") in config.model.options
    ),
    r"depth (\d)": lambda config, found: config.model.options["depth"] == int(found[1]),
    "one head": lambda config, found: config.model.options["num_heads"] == 1,
    r"\b(CIFAR-100?)(-LT)?\b": lambda config, found: config.data.name == found[1].lower().replace("-", ""),
    "Tiny-ImageNet": lambda config, found: config.data.root == "data/tiny_imagenet",
    "w/o (mixup|cutmix)": lambda config, found: (
        config.data.mix.cutmix == 0 and (config.data.mix.mixup == 0) == (found[1] == "mixup")
    ),
    r"Infograph|ImageNet-LT|Places-LT|iNaturalist 2018": lambda config, found: (
        found[0].replace("-", "_") in config.data.train or found[0].lower().replace(" ", "") in config.data.train
    ),
}


def test_a_command_has_the_settings_that_its_row_states() -> None:
    for row in ROWS:
        for pattern, check in STATED.items():
            if found := re.search(pattern, row.label):
                assert check(load(row.path, *row.settings), found), (row, pattern)


def test_every_pattern_is_used() -> None:
    for pattern in STATED:
        assert any(re.search(pattern, row.label) for row in ROWS), pattern


def table(first: str) -> dict[str, list[str]]:
    """Return the cells of the table whose head starts with ``first``, by the first cell of their row."""
    lines = GUIDE[GUIDE.index(f"| | {first} |") :].split("\n\n")[0].splitlines()[2:]
    found = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {cells[0]: cells[1:] for cells in found}


def test_settings_of_the_detectors_are_those_of_the_guide() -> None:
    stated = table("DETR")
    for column, name in enumerate(
        [
            "detr/detr_r50.yaml",
            "conditional_detr/conditional_detr_r50.yaml",
            "smca/smca_r50.yaml",
            "smca/smca_multi_scale_r50.yaml",
            "deformable_detr/deformable_detr_r50.yaml",
        ]
    ):
        config = load(name)
        model, loss, optimizer = config.model, config.loss, config.optimizer
        found = {
            "learning rate, backbone": [optimizer.lr, optimizer.backbone_lr],
            "batch": [config.train.batch_size],
            "queries": [model.num_queries],
            "classification, class cost": [loss.class_weight, loss.matcher.class_cost],
            "encoder layers, feed-forward": [model.encoder_layers, model.feedforward_dim],
            "feature maps": model.backbone.strides,
        }
        assert set(found) == set(stated)
        for label, numbers in found.items():
            words = stated[label][column].replace(",", "").split()
            if label.startswith("classification"):
                assert words.pop(0).replace("-", "_") == loss.classification
            assert [float(word) for word in words] == numbers, (name, label)


SETTINGS = {  # first column of a table of settings: configs of the columns
    "DeiT, ImageNet": [
        "classification/deit/deit_small.yaml",
        "classification/batchformer_v2/deit_small_cifar100.yaml",
        "classification/batchformer/resnet50_imagenet_lt.yaml",
        "masked/batchformer_v2/mae_vit_base.yaml",
        "classification/batchformer_v2/mae_vit_base_probe.yaml",
        "classification/relative_localization/vit_base_cifar10.yaml",
    ],
    "RIDE, ImageNet-LT": [
        "classification/batchformer/resnet50_imagenet_lt_ride.yaml",
        "classification/batchformer/resnet50_inaturalist2018_ride.yaml",
        "classification/batchformer/resnet32_cifar100_lt100_ride.yaml",
        "classification/batchformer/resnet32_cifar100_lt100.yaml",
        "classification/batchformer/resnet152_places_lt.yaml",
    ],
}


@pytest.mark.parametrize("first", SETTINGS)
def test_settings_of_the_classifiers_are_those_of_the_guide(first: str) -> None:
    stated = table(first)
    keys = {
        "optimizer": "optimizer.name",
        "learning rate": "optimizer.lr",
        "total batch": "train.batch_size",
        "weight decay": "optimizer.weight_decay",
        "epochs": "train.epochs",
        "warm-up epochs": "optimizer.warmup_epochs",
        "cosine down to": "optimizer.min_lr",
        "mixup": "data.mix.mixup",
        "CutMix": "data.mix.cutmix",
        "random erasing": "data.transforms.erase",
        "copies of each image": "data.repeats",
        "drop path": "model.drop_path",
        "clipping": "optimizer.clip_norm",
        "schedule": "optimizer.schedule",
        "learning rate of BatchFormer, share": "plugins.batchformer.lr_factor",
    }
    assert set(stated) <= {*keys, "source"}
    for column, name in enumerate(SETTINGS[first]):
        found = values(Row("", name, (), ""))
        for label in stated.keys() - {"source"}:
            word = stated[label][column]
            value = word.lower() if label in ("optimizer", "schedule") else None if word == "none" else float(word)
            assert found.get(keys[label]) == value, (name, label)
        assert len(stated["total batch"]) == len(SETTINGS[first])


STEPS = {"optimizer.schedule": "step", "optimizer.warmup_epochs": 5, "optimizer.nesterov": True}
RELEASED: dict[str, dict[str, Any]] = {  # values copied from released files, by recipe
    # zhihou7/BatchFormer at 305efaa, long-tailed_recognition/BalancedSoftmax/config/ImageNet_LT, CIFAR100_LT, Places_LT
    "resnet50_imagenet_lt": {"optimizer.lr": 0.05, "train.batch_size": 128, "train.epochs": 90},
    "resnet32_cifar100_lt100": {
        "optimizer.lr": 0.1,  # warmup_lr
        "train.batch_size": 512,
        "train.epochs": math.ceil(13000 / 22),  # num_iterations / batches of 10,847 images
        "optimizer.warmup_epochs": math.ceil(800 / 22),  # warmup_iterations
        "optimizer.weight_decay": 5e-4,
    },
    "resnet152_places_lt": {"optimizer.lr": 0.02, "train.batch_size": 256, "train.epochs": 10, "model.frozen": True},
    # the same, long-tailed_recognition/RIDE-LongTailRecognition/configs; iNaturalist has the paper's cosine
    "resnet50_imagenet_lt_ride": {
        **STEPS,
        "optimizer.lr": 0.1,
        "optimizer.weight_decay": 2e-4,
        "optimizer.drop_epochs": [60, 80],
        "optimizer.drop_factor": 0.1,
        "loss.ride.diversity": 0.2,
        "loss.ride.reweight_factor": 0.02,
        "loss.ride.reweight_epoch": 80,
        "train.epochs": 100,
    },
    "resnet50_inaturalist2018_ride": {"optimizer.lr": 0.2, "loss.ride.reweight_factor": 0.015, "train.epochs": 100},
    # frank-xwang/RIDE-LongTailRecognition at ab8be5c, configs/config_imbalance_cifar100_ride.json and model/loss.py
    "resnet32_cifar100_lt100_ride": {
        **STEPS,
        "optimizer.lr": 0.1,
        "optimizer.weight_decay": 5e-4,
        "optimizer.drop_epochs": [160, 180],
        "optimizer.drop_factor": 0.01,
        "loss.ride.diversity": 0.45,
        "loss.ride.reweight_factor": 0.05,
        "loss.ride.reweight_epoch": 160,
        "loss.ride.margin": 0.5,
        "train.batch_size": 128,
        "train.epochs": 200,
    },
    # ChengyueGongR/PatchVisionTransformer at b70ee23, README, what the paper does not state
    "vit_large_in22k": {
        "model.drop_path": 0,
        "data.transforms.auto_augment": "rand-n1-m1-mstd0.5-inc1",
        "data.transforms.erase": 1e-6,
        "loss.label_smoothing": 1e-6,
        "data.mix.mixup": 0,
        "optimizer.clip_norm": 0,
        "optimizer.weight_decay": 1e-8,
    },
}


def test_recipes_have_the_values_of_the_released_code() -> None:
    for name in RELEASED:
        (row,) = (row for row in CLASSIFIERS if str(row) == name)
        found = values(row)
        assert {key: found[key] for key in RELEASED[name]} == RELEASED[name], name


def test_a_plug_in_is_the_only_difference_to_a_baseline() -> None:
    """Except that DiversePatch trains without repeated augmentation."""
    for row in (row for row in CLASSIFIERS if plug_ins(row) and ": batch" not in row.label):
        (plugin,) = plug_ins(row)
        own, others = values(row), [values(other) for other in CLASSIFIERS if not plug_ins(other)]
        mixes = plugin == "diverse_patch" and own["plugins.diverse_patch.patch_cutmix"]
        assert any(
            {key for key in own if own[key] != other[key] and not key.startswith(f"plugins.{plugin}.")}
            == ({"data.repeats"} if mixes and other["data.repeats"] > 1 else set())
            for other in others
        ), row


def test_rows_of_the_ablation_of_diverse_patch_differ_in_the_losses_alone() -> None:
    rows = [row for row in CLASSIFIERS if re.search("(B24|Swin-B), [cm]", row.label)]
    assert [row.number for row in rows] == ["83.5", "83.4", "82.5", "82.6", "82.8", "83.1", "83.1", "83.3"]
    for network in ("deit_base", "swin_base"):
        found = [values(row) for row in rows if values(row)["model.name"].startswith(network)]
        changed = {key for one in found for key in one if one[key] != found[0][key]}
        assert changed <= {f"plugins.diverse_patch.{loss}" for loss in ("cosine", "contrastive", "mixing")}


def test_diverse_patch_has_the_lengths_of_its_paper() -> None:
    """400 epochs from scratch, 300 for Table 6, 30 for fine-tuning at a constant learning rate."""
    rows = [values(row) for row in CLASSIFIERS if row.path.startswith("classification/diverse_patch/")]
    tuned, scratch = ([row for row in rows if row["model.pretrained"] == own] for own in (True, False))
    assert all(row["train.epochs"] == 30 and row["train.batch_size"] == 1024 for row in tuned)
    assert {(row["optimizer.lr"], row["optimizer.min_lr"], row["optimizer.weight_decay"]) for row in tuned} == {
        (1e-5, 1e-5, 1e-8)
    }
    assert {row["optimizer.warmup_epochs"] for row in tuned} == {0}
    assert sorted(row["train.epochs"] for row in scratch) == [300] * 10 + [400] * 16
    assert [row["model.drop_path"] for row in scratch].count(0.5) == len(scratch) - 2, "two rows train without"


def test_a_linear_probe_starts_from_the_pre_training_of_its_row() -> None:
    for row in (row for row in CLASSIFIERS if "_probe" in row.path):
        probe = load(row.path, *row.settings)
        (first,) = (other for other in PRETRAINED if other.label.split(": ")[1] == row.label.split(": ")[1])
        before = load(first.path, *first.settings)
        assert probe.init_from == f"{before.output_dir}/last.pt", row
        assert probe.model.name == before.model.name, row
        assert probe.model.linear_probe != probe.model.frozen, row


def test_a_second_stage_starts_from_the_last_checkpoint_of_a_recipe() -> None:
    for row in (row for row in ROWS if values(row)["init_from"]):
        config = load(row.path, *row.settings)
        folder, _, file = config.init_from.rpartition("/")
        assert file == "last.pt", "a folder is its best checkpoint"
        first = [load(other.path, *other.settings) for other in ROWS if other.path != row.path]
        networks = [_network_of(before) for before in first if before.output_dir == folder]
        assert _network_of(config) in networks, row


def _network_of(config: Any) -> str:
    return config.model.backbone.name if config.task == "detection" else config.model.name


def test_batch_attention_is_set_by_the_files_that_mean_to_have_it() -> None:
    """The default is off; recipes of BatchFormerV2 and the demos say that it is on."""
    for name in (name for name in FILES if "classification" not in name and "experiments" not in name):
        config = load(name)
        if config.task == "detection":
            demos = ("demo.yaml", "demo_deformable.yaml", "demo_panoptic.yaml", "pairs.yaml", "deeppcb.yaml")
            on = name.endswith("_bfv2.yaml") or name in demos
            assert config.batch_former.enabled == on, name
            assert not on or config.sources["batch_former.enabled"].startswith("file "), name


@pytest.mark.parametrize("stage", ["panoptic_detr_r50", "panoptic_detr_r50_bfv2", "panoptic_detr_r50_bfv2_boxes_only"])
def test_the_mask_stage_starts_from_the_last_checkpoint_of_the_boxes(stage: str) -> None:
    masks, boxes = (
        load(f"panoptic/{stage}.yaml"),
        load(f"panoptic/panoptic_detr_r50_boxes{'_bfv2' * ('bfv2' in stage)}.yaml"),
    )
    assert masks.init_from == f"{boxes.output_dir}/last.pt"
    assert masks.freeze.detector
    assert masks.model.masks


@pytest.mark.default_tier("deit_base24_dp", "resnet50_imagenet_lt", "swin_tiny_infograph", "deit_small_cb_scaled")
@pytest.mark.parametrize("row", CLASSIFIERS, ids=str)
def test_every_classifier_builds_with_its_plug_ins(row: Row) -> None:
    config = load(row.path, *row.settings)
    with torch.device("meta"):
        network = build_classifier(config, NUM_CLASSES, pretrained=False)
    assert set(getattr(network, "plugins", nn.ModuleDict())) == plug_ins(row)


def test_every_masked_autoencoder_builds() -> None:
    for row in MASKED:
        config = load(row.path, *row.settings)
        with torch.device("meta"):
            model = build_masked_autoencoder(config)
        assert len(model.decoder.layers) == config.model.decoder_depth, row
        assert (model.decoder.batch_former is not None) == config.batch_former.enabled, row


def test_contrastive_pre_training_builds_with_its_batchformer() -> None:
    for row in CONTRASTIVE:
        config = load(row.path, *row.settings)
        with torch.device("meta"):
            model = build_contrastive(config)
        assert (model.batch_former is not None) == config.batch_former.enabled, row
        trained = {name.split(".")[0] for name, value in model.named_parameters() if value.requires_grad}
        former = {"batch_former"} if config.batch_former.enabled and not config.batch_former.frozen else set()
        assert trained == {"encoder", "projector", "predictor"} | former, row


@pytest.mark.parametrize(
    ("command", "millions"),
    [
        ("deit_small", 22.1),
        ("resnet10_imagenet_lt", 5.4),
        ("resnet152_places_lt", 60.2),
        ("deit_small12 model.name=deit_base_patch16_224 model.options.depth=24", 171.6),
        ("swin_tiny_infograph", 28.3),
        ("deit_small model.name=pit_b_224", 73.8),
        ("deit_small model.name=mixer_s16_224", 18.5),
        ("resnet50_infograph", 25.6),
        ("swin_base plugins.diverse_patch={enabled: true, contrastive: 0}", 88.8),
    ],
)
def test_networks_are_as_large_as_the_papers(command: str, millions: float) -> None:
    """Compute with the 1,000 classes of ImageNet."""
    (row,) = (row for row in CLASSIFIERS if str(row) == command)
    with torch.device("meta"):
        network = build_classifier(load(row.path, *row.settings), 1000, pretrained=False)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


SEGMENTERS = {  # millions of parameters, of 150 classes; those of the tables, 121 and 234, are rounded
    "upernet_vit_small_ade20k": 52.2,
    "upernet_vit_small_cb_ade20k": 52.2,
    "upernet_swin_tiny_ade20k": 59.9,
    "upernet_swin_base_ade20k": 121.3,
    "upernet_swin_base_ade20k model.backbone.name=timm:swin_large_patch4_window12_384.ms_in22k": 234.0,
}


@pytest.mark.default_tier("upernet_vit_small_cb_ade20k", "upernet_swin_base_ade20k")
@pytest.mark.parametrize("command", SEGMENTERS)
def test_segmentation_networks_build_and_are_as_large_as_stated(command: str) -> None:
    (row,) = (row for row in ROWS if str(row) == command)
    config = load(row.path, *row.settings)
    with torch.device("meta"):
        network = build_segmenter(config, 150, pretrained=False)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(
        SEGMENTERS[command], abs=0.06
    )


def test_segmentation_rows_have_the_steps_and_the_backbone_that_they_state() -> None:
    rows = [row for row in ROWS if row.path.startswith("segmentation/")]
    assert len(rows) == 30
    network = ""
    for row in rows:
        config, label = load(row.path, *row.settings), row.label.partition(": ")[2]
        size = re.match(r"(tiny|small|base|large) (ViT|Swin)", label)
        network = f"{size[2].replace('ViT', 'deit').lower()}_{size[1]}_" if size else network
        assert config.model.backbone.name.startswith(f"timm:{network}"), row
        assert config.plugins.context_broadcasting.enabled == label.startswith("+"), row
        assert config.plugins.context_broadcasting.scaled == ("scales" in label), row
        steps = 80_000 if "cityscapes" in row.path else 160_000 if "160" in label or "swin" in row.path else 40_000
        batches = 2975 // 8 if "cityscapes" in row.path else 20_210 // 16
        assert config.train.max_steps == steps, row
        assert steps <= config.train.epochs * batches < steps + batches, row


def test_an_installation_has_every_file() -> None:
    patterns = re.findall(r'"([*a-z0-9/]+\.(?:yaml|py))"', (ROOT / "setup.py").read_text())
    assert patterns
    installed = {path for pattern in patterns for path in CONFIGS.glob(pattern)}
    assert installed == {*CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("lazy/*.py")}


def test_packaged_configs_are_found_by_name_without_a_collision() -> None:
    assert sorted(packaged_configs().values()) == [
        path
        for path in sorted(CONFIGS.rglob("*.yaml"))
        if path.parent.name not in ("base", "compare") and "detectron2" not in path.parts
    ]
    assert packaged_experiments() == {path.stem: path for path in CONFIGS.glob("compare/*.yaml")}


@pytest.mark.default_tier("rtdetr/rtdetr_r18.yaml", "detr/detr_r50.yaml")
@pytest.mark.parametrize("name", [name for name in RECIPES if name.split("/")[0] not in TASKS])
def test_deim_is_merged_after_the_config_of_any_detector(name: str) -> None:
    alone = load(name)
    if alone.freeze.detector:
        pytest.skip("the mask stage trains no detector")
    merged = load_config([CONFIGS / name, CONFIGS / "deim.yaml"])
    assert merged.model == alone.model
    assert (merged.optimizer.lr, merged.optimizer.backbone_lr) == (alone.optimizer.lr, alone.optimizer.backbone_lr)
    assert isinstance(build_classification(merged), MatchabilityAware)
    augmented, dense = augmented_epochs(merged)
    assert (augmented, dense) == (range(4, 58), range(4, 34))
    rate = learning_rate(merged, 1000)
    assert [rate(1000 * epoch) for epoch in (5, 33, 58)] == pytest.approx([1, 1, 0.5])


def test_the_decay_of_averaged_weights_rises_in_recipes_of_rtdetr_and_not_in_fine_tuning() -> None:
    """Compare with ``warmups`` of lyuwenyu/RT-DETR at 068dfde, rtdetr_pytorch/configs/rtdetr/include/optimizer.yml."""
    for name in (name for name in RECIPES if name.startswith(("rtdetr/", "deim/deim_rtdetr"))):
        average = load(name).train.ema
        assert (average.enabled, average.decay, average.warmup_steps) == (True, 0.9999, 2000), name
        average = load_config([CONFIGS / name, CONFIGS / "finetune.yaml"]).train.ema
        assert (average.enabled, average.decay, average.warmup_steps) == (True, "auto", 0), name


@pytest.mark.full
def test_published_recipes_of_detectors_round_no_side_and_fine_tuning_does() -> None:
    for name in (name for name in RECIPES if name.split("/")[0] not in TASKS):
        if "coco" in load(name).data.train.images:
            assert load(name).size_divisor == 1, name
        tuned = load_config([CONFIGS / name, CONFIGS / "finetune.yaml"])
        backbone, coarsest = tuned.model.backbone, max(tuned.model.all_strides)
        side = backbone.strides[-1] * backbone.vit.windows  # of the smallest image of whole windows
        assert 12 <= tuned.size_divisor <= max(coarsest, side), name
        assert not tuned.size_divisor % coarsest, name
        assert not tuned.size_divisor % side, name
