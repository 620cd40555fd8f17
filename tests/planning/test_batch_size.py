"""Choice of the batch size by trials, with a simulated lack of memory, and the precision of a device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from detr_bf.assembly import build_model, training
from detr_bf.assembly.data import build_train_data
from detr_bf.assembly.training import precision_of
from detr_bf.commands import command_main
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, load_config
from detr_bf.engine import load_checkpoint
from detr_bf.planning import batch as planning_batch
from detr_bf.planning.batch import (
    divisors,
    estimated_size,
    fit_batch,
    largest_fitting,
    trial_step,
    worst_batch,
    worst_size,
)
from tests.planning.test_planning import TINY

Factory = Callable[..., SimpleNamespace]
GPU = torch.device("cuda", 0)


def trials(most: int) -> tuple[list[int], Callable[[int], None]]:
    """Return the sizes tried so far, and a trial that fails above ``most`` images."""
    tried: list[int] = []

    def attempt(size: int) -> None:
        tried.append(size)
        if size > most:
            raise torch.OutOfMemoryError("simulated")

    return tried, attempt


@pytest.mark.parametrize(
    ("images", "first", "most", "expected"),
    [
        (16, 16, 100, [16]),
        (16, 16, 5, [16, 8, 4]),
        (16, 4, 100, [4]),
        (12, 12, 5, [12, 6, 3]),
        (6, 3, 2, [3, 1]),
        (7, 7, 6, [7, 1]),
    ],
)
def test_a_batch_is_halved_until_it_fits(images: int, first: int, most: int, expected: list[int]) -> None:
    tried, attempt = trials(most)
    assert largest_fitting(divisors(images), first, attempt) == expected[-1]
    assert tried == expected
    assert all(images % size == 0 for size in tried), "accumulation keeps the total"


def test_no_batch_fits() -> None:
    assert largest_fitting(divisors(4), 4, trials(0)[1]) is None
    with pytest.raises(RuntimeError, match="other"):  # only a lack of memory is a reason for a smaller batch
        largest_fitting([4, 2, 1], 4, lambda size: (_ for _ in ()).throw(RuntimeError("other")))


def test_all_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank lacks memory for 8 images."""
    tried, attempt = trials(100)
    gathered = iter([[False, True], [False, False]])
    monkeypatch.setattr(planning_batch.distributed, "all_gather_object", lambda failed: next(gathered))
    assert largest_fitting([8, 4, 2, 1], 8, attempt) == 4
    assert tried == [8, 4]


@pytest.fixture
def data(coco_folder: Factory) -> list[str]:
    """Return the settings of six images of 64 x 48 pixels (width x height) for training and validation."""
    folder = coco_folder()
    paths = [f"data.{split}.{key}" for split in ("train", "val") for key in ("images", "annotations")]
    return [f"{name}={value}" for name, value in zip(paths, (folder.images, folder.annotations) * 2, strict=True)]


def config_of(data: list[str], *settings: str) -> DetectionConfig:
    return load_config(None, [*TINY, *data, "train.auto_batch=true", *settings], task="detection")


def test_a_trial_leaves_the_model_and_random_numbers_as_they_are(data: list[str]) -> None:
    config = config_of(data, "model.backbone.frozen_norm=false", "batch_former.enabled=true", "train.ema.enabled=true")
    model = build_model(config, 3, pretrained=False).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    batch = worst_batch(3, (64, 96), 5, masks=False, references=False)
    torch.set_rng_state(state)
    seen: list[int] = []
    trained = next(parameter for parameter in model.backbone.parameters() if parameter.requires_grad)
    trained.register_hook(lambda gradient: seen.append(int(gradient.isfinite().all())))
    trial_step(config, model, batch, torch.device("cpu"))
    assert seen == [1, 1], "gradients of two passes reach the backbone"
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("data.transforms.random_crop=0",), None),
        (("data.transforms.random_crop=0.5",), (128, 128)),
        (("data.transforms.random_crop=0", "data.augment.mosaic=0.1"), (128, 128)),
        (("data.transforms.square=64",), (64, 64)),
    ],
)
def test_the_largest_padded_image(data: list[str], settings: tuple[str, ...], expected: tuple[int, int] | None) -> None:
    config = config_of(data, *settings)
    images = build_train_data(config)
    if expected is None:
        shapes = [images[each][0].shape[1:] for each in images_keys(images)]
        expected = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    assert worst_size(config, images) == expected


def images_keys(images: Any) -> list[Any]:
    from detr_bf.data.batches import SampleKey

    return [SampleKey(0, index) for index in range(len(images))]


@pytest.mark.full
def test_the_estimate_falls_with_the_memory(data: list[str]) -> None:
    config = config_of(data)
    sizes = [8, 4, 2, 1]
    assert estimated_size(config, 3, sizes, 2**40) == 8
    assert estimated_size(config, 3, sizes, 1.0) == 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that a GPU holds two images; return the sizes tried."""
    tried, attempt = trials(2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(planning_batch, "trial_step", lambda config, model, batch, device: attempt(len(batch)))
    monkeypatch.setattr(planning_batch, "precision_of", lambda config, device: torch.float32)
    return tried


def test_a_gpu_gets_the_batch_that_fits(data: list[str], gpu: list[int]) -> None:
    config = config_of(data, "train.batch_size=4", "train.accumulate=2")
    fit_batch(config, nn.Identity(), build_train_data(config), GPU)  # type: ignore[arg-type]
    assert (config.train.batch_size, config.train.accumulate) == (2, 4)
    assert gpu == [8, 4, 2]
    mixed = config_of(data, "train.batch_size=3", "data.mixup.prob=0.5", "data.transforms.random_crop=0")
    with pytest.raises(InputError, match=r"3 images of \d+ x \d+ pixels with \d+ objects need more"):
        fit_batch(mixed, nn.Identity(), build_train_data(mixed), GPU)  # type: ignore[arg-type]


def test_the_trial_has_the_references_that_training_reads(
    data: list[str], gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []
    monkeypatch.setattr(
        planning_batch, "trial_step", lambda config, model, batch, device: tried.append(batch.references is not None)
    )
    for settings in (("data.reference=random", "model.backbone.reference=stack", "model.backbone.frozen_stages=0"), ()):
        config = config_of(data, "train.batch_size=1", *settings)
        fit_batch(config, nn.Identity(), build_train_data(config), GPU)  # type: ignore[arg-type]
    assert tried == [True, False]


def test_a_cpu_keeps_the_batch_and_says_so(data: list[str], caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(data, "train.batch_size=3")
    with caplog.at_level("INFO"):
        fit_batch(config, nn.Identity(), build_train_data(config), torch.device("cpu"))  # type: ignore[arg-type]
    assert (config.train.batch_size, config.train.accumulate) == (3, 1)
    assert "on a CPU batch_size=3 stays as it is" in caplog.text


@pytest.mark.full
def test_a_run_stores_what_it_chose_and_resumes_with_it(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def halve(config: DetectionConfig, *_: Any) -> None:
        config.train.batch_size, config.train.accumulate = 1, 2

    monkeypatch.setattr(planning_batch, "fit_batch", halve)
    (tmp_path / "run.yaml").write_text(json.dumps({"output_dir": str(tmp_path / "run")}))
    command = [str(tmp_path / "run.yaml"), *TINY, *data, "train.auto_batch=true", "train.batch_size=2", "device=cpu"]
    command += ["data.workers=0", "eval.pictures=0", "data.check=false"]
    assert command_main("train")([*command, "train.epochs=1"]) == 0
    stored = load_checkpoint(tmp_path / "run" / "last.pt").config["train"]
    assert (stored["batch_size"], stored["accumulate"]) == (1, 2)
    monkeypatch.delattr(planning_batch, "fit_batch")  # a resumed run chooses nothing
    capfd.readouterr()
    assert command_main("train")([*command, "train.epochs=2", "--resume"]) == 0
    log = capfd.readouterr().err
    assert "train.epochs: 1 -> 2" in log
    assert "batch_size" not in log
    stored = load_checkpoint(tmp_path / "run" / "last.pt").config["train"]
    assert (stored["batch_size"], stored["accumulate"]) == (1, 2)


def test_images_of_other_processes_are_not_tried(data: list[str]) -> None:
    with pytest.raises(InputError, match="auto_batch=true tries batches on each GPU by itself"):
        config_of(data, "batch_former.gather=true")


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_automatic_precision(native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["train.precision=auto"], task="detection")
    assert precision_of(config, torch.device("cpu")) is torch.float32
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return native

    monkeypatch.setattr(torch.cuda, "device", lambda device: open(os.devnull))  # noqa: SIM115, PTH123  a context
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert precision_of(config, GPU) is expected
    assert asked == [False]
    config.train.precision = "fp16"
    assert precision_of(config, torch.device("cpu")) is torch.float16


@pytest.mark.parametrize(("capabilities", "slow"), [({"avx512_fp16": False}, True), ({"avx512_fp16": True}, False)])
def test_slow_float16_on_a_cpu_is_told(
    capabilities: dict[str, bool], slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    training._warn_of_slow_fp16.cache_clear()
    config = DetectionConfig()
    config.train.precision = "fp16"
    for _ in range(2):
        precision_of(config, torch.device("cpu"))
    assert caplog.text.count("train.precision=fp16 is about twenty times slower than bf16") == slow
    training._warn_of_slow_fp16.cache_clear()
