"""Optimizer, training and evaluation on a few drawn images."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2.config")

from detectron2.engine import default_argument_parser
from detectron2.modeling import build_model

from detr_bf.assembly import build_groups
from detr_bf.common.errors import InputError
from detr_bf.detectron2 import build_clipped_optimizer, optimizer_of, train_lazy, train_yacs
from detr_bf.detectron2.meta_arch import core_config

from .conftest import TINY, detector_options

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "detectron2"
FULL_MODEL = ["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"]
ARCHITECTURES = ("detr", "conditional_detr", "smca", "deformable_detr")
RECIPES = {  # of detectors without a config in configs/detectron2, and the end of their further losses
    "dab_deformable_detr": ("dab_deformable_detr_r50", ""),
    "dab_detr": ("dab_detr_r50", ""),
    "dino": ("dino_r50_4scale", "_dn"),
    "dn_detr": ("dn_detr_r50", "_dn"),
    "h_deformable_detr": ("h_deformable_detr_r50", "_one_to_many"),
    "rtdetr": ("rtdetr_r18", "_dn"),
    "rtdetrv2": ("rtdetrv2_r18", "_dn"),
}
FILES = {"config.yaml", "log.txt", "metrics.json", "model_final.pth", "last_checkpoint", "inference"}

pytestmark = pytest.mark.usefixtures("catalogs")


@pytest.fixture
def toy(coco_folder: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    return coco_folder(num_images=4)


def yacs_options(folder: Path, toy: SimpleNamespace, *more: Any) -> list[str]:
    settings = [
        *TINY,
        *("DATASETS.REGISTER_COCO", [("toy", str(toy.images), str(toy.annotations))]),
        *("DATASETS.TRAIN", ("toy",), "DATASETS.TEST", ("toy",), "OUTPUT_DIR", str(folder)),
        *("SOLVER.MAX_ITER", 3, "SOLVER.IMS_PER_BATCH", 2, "SOLVER.STEPS", (2,), "SOLVER.CHECKPOINT_PERIOD", 2),
        *("TEST.EVAL_PERIOD", 3, "DATALOADER.NUM_WORKERS", 0, "INPUT.MIN_SIZE_TRAIN", (48,), "INPUT.MIN_SIZE_TEST", 48),
        *("INPUT.CROP_SHORT_SIDES", (48,), "INPUT.CROP.SIZE", (32, 40)),
        *more,
    ]
    return [str(value) for value in settings]


def train_from_yacs(config: str, folder: Path, toy: SimpleNamespace, *more: Any, flags: tuple[str, ...] = ()) -> Any:
    arguments = ["--config-file", str(CONFIGS / "yacs" / f"{config}.yaml"), *flags, *yacs_options(folder, toy, *more)]
    return train_yacs(default_argument_parser().parse_args(arguments))


def lazy_options(folder: Path, toy: SimpleNamespace, *more: str) -> list[str]:
    sizes = {"hidden_dim": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "feedforward_dim": 32}
    model = {**sizes, "num_queries": 7, "backbone.name": "resnet18", "backbone.weights": "none"}
    return [
        "model.num_classes=3",
        *(f"model.model.{key}={value}" for key, value in model.items()),
        *(f"dataloader.{split}.dataset.names=toy" for split in ("train", "test")),
        *(f"dataloader.{split}.num_workers=0" for split in ("train", "test")),
        "dataloader.train.total_batch_size=2",
        "dataloader.train.mapper.augmentations.short_sides=[48]",
        "dataloader.train.mapper.augmentations.crop_probability=0",
        "dataloader.test.mapper.augmentations.short_side=48",
        *(f"train.{key}" for key in ("device=cpu", "max_iter=3", "eval_period=3", f"output_dir={folder}")),
        *more,
    ]


def registration(toy: SimpleNamespace) -> str:
    paths = [str(toy.images), str(toy.annotations)]
    if hasattr(toy, "panoptic"):
        return f"register_coco_panoptic('toy', *{[*paths, str(toy.panoptic)]})"
    return f"register_coco('toy', *{paths})"


def lazy_file(folder: Path, toy: SimpleNamespace, config: str, model: str = "") -> Path:
    """Write a config that registers its data and imports the rest from an example, but the model from a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (CONFIGS / "lazy").glob("*.py"):
        (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    text = (
        "from detr_bf.detectron2 import register_coco, register_coco_panoptic\n"
        f"from .{config} import dataloader, lr_multiplier, model, optimizer, train\n"
        f"{registration(toy)}\n"
    )
    if model:
        text += f"from detr_bf.detectron2 import recipe\nmodel = recipe('{model}')\n"
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return folder / "mine.py"


def train_from_lazy(
    tmp_path: Path,
    config: str,
    folder: Path,
    toy: SimpleNamespace,
    *more: str,
    model: str = "",
    flags: tuple[str, ...] = (),
) -> Any:
    path = lazy_file(tmp_path / "lazy", toy, config, model)
    arguments = ["--config-file", str(path), *flags, *lazy_options(folder, toy, *more)]
    return train_lazy(default_argument_parser().parse_args(arguments))


def check_folder(folder: Path) -> list[dict[str, Any]]:
    """Check the output folder for all files of detectron2; return the lines of metrics.json."""
    found = {path.name for path in folder.iterdir()}
    assert found >= FILES, FILES - found
    assert any(name.startswith("events.out.tfevents") for name in found)
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    assert any("bbox/AP" in line for line in lines)
    assert any(
        {"total_loss", "loss_ce", "loss_bbox", "loss_giou", "class_error", "lr"} <= line.keys() for line in lines
    )
    return lines


@pytest.mark.parametrize("ending", ["", "_bfv2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_detector_trains_from_yacs(tmp_path: Path, toy: SimpleNamespace, architecture: str, ending: str) -> None:
    train_from_yacs(f"{architecture}_r50{ending}", tmp_path / "run", toy)
    lines = check_folder(tmp_path / "run")
    assert any("stream/batchformer" in line for line in lines) == (ending == "_bfv2")


@pytest.mark.parametrize("ending", ["", "_bfv2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_detector_trains_from_a_lazy_config(
    tmp_path: Path, toy: SimpleNamespace, architecture: str, ending: str
) -> None:
    results = train_from_lazy(tmp_path, f"{architecture}_r50{ending}", tmp_path / "run", toy)
    lines = check_folder(tmp_path / "run")
    assert any("stream/batchformer" in line for line in lines) == (ending == "_bfv2")
    assert "AP" in results["bbox"]


@pytest.mark.parametrize("architecture", [*RECIPES, "group_detr"])
def test_detectors_without_an_example_train_from_settings(
    tmp_path: Path, toy: SimpleNamespace, architecture: str
) -> None:
    end = RECIPES.get(architecture, ("", "_group"))[1]
    settings = ["MODEL.DETR_BF.ARCHITECTURE", architecture, *detector_options(architecture)]
    train_from_yacs("detr_r50_bfv2", tmp_path / "run", toy, *settings, "SOLVER.DECAY_VECTORS", False)
    lines = check_folder(tmp_path / "run")
    assert any({"stream/batchformer", f"loss_giou{end}", f"loss_giou{end}_0"} <= line.keys() for line in lines)


@pytest.mark.parametrize("architecture", RECIPES)
def test_detectors_without_an_example_train_from_recipes(
    tmp_path: Path, toy: SimpleNamespace, architecture: str
) -> None:
    name, end = RECIPES[architecture]
    further = {"queries": 20, "repeats": 2} if architecture == "h_deformable_detr" else {}  # fewer than tokens
    more = [f"model.model.groups.one_to_many.{key}={value}" for key, value in further.items()]
    more.append("optimizer.params.decay_vectors=false")
    results = train_from_lazy(tmp_path, "detr_r50", tmp_path / "run", toy, *more, model=name)
    lines = check_folder(tmp_path / "run")
    assert any({f"loss_giou{end}", f"loss_giou{end}_0"} <= line.keys() for line in lines)
    assert "AP" in results["bbox"]


def test_a_run_resumes_and_is_evaluated_alone(tmp_path: Path, toy: SimpleNamespace) -> None:
    folder = tmp_path / "run"
    train_from_yacs("detr_r50_bfv2", folder, toy)
    first = torch.load(folder / "model_final.pth", weights_only=False)
    train_from_yacs("detr_r50_bfv2", folder, toy, "SOLVER.MAX_ITER", 5, flags=("--resume",))
    last = torch.load(folder / "model_final.pth", weights_only=False)
    assert (first["iteration"], last["iteration"]) == (2, 4)
    weight = "detector.decoder.heads.classes.0.weight"
    assert not torch.equal(first["model"][weight], last["model"][weight])
    steps = {int(state["step"]) for state in last["trainer"]["_trainer"]["optimizer"]["state"].values()}
    assert steps == {5}
    alone = train_from_yacs(
        "detr_r50_bfv2", tmp_path / "alone", toy, "MODEL.WEIGHTS", folder / "model_final.pth", flags=("--eval-only",)
    )
    from_folder = train_from_yacs("detr_r50_bfv2", folder, toy, flags=("--eval-only", "--resume"))
    assert alone["bbox"] == pytest.approx(from_folder["bbox"], nan_ok=True)


def test_a_lazy_run_resumes_and_is_evaluated_alone(tmp_path: Path, toy: SimpleNamespace) -> None:
    folder = tmp_path / "run"
    trained = train_from_lazy(tmp_path, "detr_r50", folder, toy)
    alone = train_from_lazy(
        tmp_path, "detr_r50", tmp_path / "alone", toy, f"train.init_checkpoint={folder}/model_final.pth",
        flags=("--eval-only",),
    )  # fmt: skip
    assert alone["bbox"] == pytest.approx(trained["bbox"], nan_ok=True)
    train_from_lazy(tmp_path, "detr_r50", folder, toy, "train.max_iter=4", flags=("--resume",))
    assert torch.load(folder / "model_final.pth", weights_only=False)["iteration"] == 3


def test_another_number_of_classes_ends_a_lazy_run_before_it_begins(tmp_path: Path, toy: SimpleNamespace) -> None:
    with pytest.raises(InputError, match=r"toy has 3 classes, the model 80: .*model.num_classes=3"):
        train_from_lazy(tmp_path, "detr_r50", tmp_path / "run", toy, "model.num_classes=80")


@pytest.mark.parametrize("flags", [("--eval-only",), ("--eval-only", "--resume")])
def test_nothing_to_evaluate_is_told(tmp_path: Path, toy: SimpleNamespace, flags: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"nothing to evaluate: give weights with MODEL.WEIGHTS FILE"):
        train_from_yacs("detr_r50", tmp_path / "run", toy, flags=flags)
    with pytest.raises(InputError, match=r"nothing to evaluate: .*train.init_checkpoint=FILE"):
        train_from_lazy(tmp_path, "detr_r50", tmp_path / "lazy_run", toy, flags=flags)


@pytest.mark.slow
def test_two_processes_train_a_lazy_config_on_cpus(tmp_path: Path, toy: SimpleNamespace) -> None:
    path = lazy_file(tmp_path / "lazy", toy, "detr_r50_bfv2")
    more = ("train.ddp.device_ids=null", "model.batch_former.gather=true")
    command = [sys.executable, ROOT / "tools" / "d2_lazy_train_net.py", "--config-file", path, "--num-gpus", "2"]
    command += ["--dist-url", "auto", *lazy_options(tmp_path / "run", toy, *more)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_folder(tmp_path / "run")
    assert (tmp_path / "run" / "log.txt.rank1").exists()


def test_both_panoptic_stages_train(tmp_path: Path, panoptic_folder: Callable[..., SimpleNamespace]) -> None:
    data = panoptic_folder()
    paths = ("toy", str(data.images), str(data.annotations), str(data.panoptic))
    classes = len(data.content["categories"])
    common = ("DATASETS.REGISTER_COCO", [paths], "MODEL.DETR_BF.NUM_CLASSES", classes)
    train_from_yacs("panoptic_detr_r50_boxes_bfv2", tmp_path / "boxes", data, *common)
    stage = ("MODEL.WEIGHTS", tmp_path / "boxes" / "model_final.pth", "MODEL.DETR_BF.PANOPTIC.THRESHOLD", 0.0)
    train_from_yacs("panoptic_detr_r50_bfv2", tmp_path / "masks", data, *common, *stage)
    boxes, masks = (
        torch.load(tmp_path / run / "model_final.pth", weights_only=False)["model"] for run in ("boxes", "masks")
    )
    assert all(torch.equal(masks[name], value) for name, value in boxes.items())
    assert {name.split(".")[1] for name in masks.keys() - boxes.keys()} == {"mask_head"}
    lines = [json.loads(line) for line in (tmp_path / "masks" / "metrics.json").read_text().splitlines()]
    assert {"panoptic_seg/PQ", "bbox/AP", "segm/AP", "loss_mask", "loss_dice"} <= {
        key for line in lines for key in line
    }
    assert (tmp_path / "masks" / "inference" / "panoptic").is_dir()


def test_both_panoptic_stages_train_from_lazy_configs(
    tmp_path: Path, panoptic_folder: Callable[..., SimpleNamespace]
) -> None:
    data = panoptic_folder()
    classes = f"model.num_classes={len(data.content['categories'])}"
    train_from_lazy(tmp_path, "panoptic_detr_r50_boxes_bfv2", tmp_path / "boxes", data, classes)
    stage = (classes, f"train.init_checkpoint={tmp_path}/boxes/model_final.pth", "model.eval.panoptic.threshold=0.0")
    results = train_from_lazy(tmp_path, "panoptic_detr_r50_bfv2", tmp_path / "masks", data, *stage)
    assert "PQ" in results["panoptic_seg"]
    boxes, masks = (torch.load(tmp_path / run / "model_final.pth", weights_only=False) for run in ("boxes", "masks"))
    assert all(torch.equal(masks["model"][name], value) for name, value in boxes["model"].items())


# ---- optimizer ----


def plain(norm: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters()), "lr": 1.0, "weight_decay": 0.0} for layer in model]
    return model, build_clipped_optimizer(groups, name="SGD", lr=1.0, momentum=0.0, clip_norm=norm)


@pytest.mark.parametrize(("decay_vectors", "count"), [(True, 4), (False, 6)])
def test_groups_are_the_cores(tiny_cfg: Callable[..., Any], decay_vectors: bool, count: int) -> None:
    cfg = tiny_cfg("deformable_detr", batch_former=True)
    cfg.SOLVER.DECAY_VECTORS = decay_vectors
    cfg.merge_from_list(
        [
            *("SOLVER.BASE_LR", 2e-4, "SOLVER.BACKBONE_MULTIPLIER", 0.1, "SOLVER.POINT_MULTIPLIER", 0.5),
            *("SOLVER.WEIGHT_DECAY", 1e-3, "MODEL.DETR_BF.BATCHFORMER.LR_FACTOR", 0.3),
            *("MODEL.DETR_BF.BATCHFORMER.WEIGHT_DECAY", 0.7),
        ]
    )
    model = build_model(cfg)
    config = core_config(cfg)
    config.optimizer.lr, config.optimizer.backbone_lr = 2e-4, 2e-5
    config.optimizer.decay_vectors = decay_vectors
    config.optimizer.weight_decay, config.optimizer.point_lr_factor = 1e-3, 0.5
    wanted = build_groups(config, model.detector)
    found = optimizer_of(cfg, model).param_groups
    assert len(found) == len(wanted) == count
    for ours, theirs in zip(found, wanted, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        assert ours["lr"] == pytest.approx(theirs["lr"])
        assert ours["weight_decay"] == theirs["weight_decay"]


def test_all_gradients_are_clipped_together() -> None:
    model, optimizer = plain(norm=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(5, 3)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert norm > 0.1
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter, old - gradient * 0.1 / norm)


def test_clipping_sees_gradients_without_the_factor_of_mixed_precision() -> None:
    model, optimizer = plain(norm=0.1)
    twin, twin_optimizer = plain(norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(torch.ones(5, 3)).square().sum()).backward()
    scaler.step(optimizer)
    twin(torch.ones(5, 3)).square().sum().backward()
    twin_optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_small_gradients_stay_as_they_are() -> None:
    model, optimizer = plain(norm=1e6)
    before = copy.deepcopy(model)
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - parameter.grad)


@pytest.mark.parametrize(("name", "kind"), [("ADAMW", torch.optim.AdamW), ("SGD", torch.optim.SGD)])
def test_the_config_names_the_optimizer(tiny_cfg: Callable[..., Any], name: str, kind: type) -> None:
    cfg = tiny_cfg()
    cfg.merge_from_list([*FULL_MODEL, "SOLVER.OPTIMIZER", name])
    assert isinstance(optimizer_of(cfg, build_model(cfg)), kind)


def test_detectron2s_own_clipping_stays_available(tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg()
    cfg.merge_from_list(["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "value"])
    assert type(optimizer_of(cfg, build_model(cfg))).__name__ == "AdamWWithGradientClip"


def test_what_cannot_be_is_told(tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg()
    model = build_model(cfg)
    cfg.SOLVER.OPTIMIZER = "LION"
    with pytest.raises(InputError, match="must be ADAMW or SGD, got 'LION'"):
        optimizer_of(cfg, model)
    cfg.merge_from_list([*FULL_MODEL, "SOLVER.OPTIMIZER", "ADAMW", "SOLVER.CLIP_GRADIENTS.NORM_TYPE", 1.0])
    with pytest.raises(InputError, match=r"clips the 2-norm, got .*1\.0"):
        optimizer_of(cfg, model)
