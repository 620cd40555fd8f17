"""Benchmark cases on synthetic data from a fixed seed: training steps, inference, matching.

Shape legend: B images, L decoder layers, Q queries, K class logits, T objects of an image, M matched pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from command import CONFIGS
from detr_bf.assembly import build_criterion, build_groups, build_model
from detr_bf.common.devices import device_of
from detr_bf.common.structures import Batch, Outputs, PaddedTargets, Target
from detr_bf.common.timing import Seconds, alternate
from detr_bf.config import DetectionConfig, load_config
from detr_bf.detectors import Detector
from detr_bf.engine import build_optimizer
from detr_bf.losses import CrossEntropy, HungarianMatcher, Matches, SetCriterion

SEED = 0
NUM_CLASSES = 80  # as COCO
OBJECTS = (3, 11, 5, 9)  # per image, cyclic; 7 on average, about as COCO
MATCHING_SIZES = ((4, 100), (16, 300))  # images, queries
MATCHING_LAYERS = 6

NO_SCALING = torch.amp.GradScaler("cpu", enabled=False)  # of losses, which fp16 needs alone
OFF, ON = "batch_former.enabled=false", "batch_former.enabled=true"
TRAINING = {"off": OFF, "on": ON, "duplicate": "batch_former={enabled: true, mode: duplicate}"}
INFERENCE = {"without": OFF, "without, again": OFF, "with": ON}


@dataclass(frozen=True)
class Preset:
    """Changes to DETR's defaults or to a recipe, and the size of its images."""

    height: int  # pixels
    width: int
    batch_size: int
    overrides: tuple[str, ...] = ()
    recipe: Path | None = None

    def config(self, *overrides: str) -> DetectionConfig:
        """Return the config with random backbone weights, which avoids a download."""
        return load_config(self.recipe, ["model.backbone.weights=none", *self.overrides, *overrides], task="detection")


_SMALL = ("backbone.name=resnet18", "hidden_dim=128", "feedforward_dim=512", "encoder_layers=3", "decoder_layers=3")
PRESETS = {
    "small": Preset(192, 256, 4, (ON, *(f"model.{setting}" for setting in _SMALL))),
    "paper": Preset(800, 1066, 4, (ON,)),
}


@dataclass(frozen=True)
class Setting:
    """Preset, device and rounds of a measurement."""

    preset: Preset
    device: torch.device
    rounds: int

    def time(self, functions: Mapping[str, Callable[[], object]], description: str, warmup: int = 2) -> Seconds:
        """Time the functions in turn; the device is synchronised around each timing."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        return alternate(functions, self.rounds, warmup=warmup, synchronize=wait, description=description)


@dataclass(frozen=True)
class Measurement:
    """Times of some variants, the pairs to compare, and checks of a fair comparison."""

    title: str
    seconds: Seconds
    comparisons: Sequence[tuple[str, str]]  # variant, baseline
    checks: dict[str, bool] = field(default_factory=dict)
    facts: dict[str, dict[str, int]] = field(default_factory=dict)  # name of the fact -> variant -> value


def measure_training(setting: Setting) -> Measurement:
    """Measure forward pass, loss, backward pass, clipping and optimiser step."""
    models = _models(setting, TRAINING)
    config, batch = setting.preset.config(), make_batch(setting)
    criterion = build_criterion(config)
    rows = {name: model.train()(batch).logits.shape[1] for name, model in models.items()}
    steps = {
        name: partial(training_step, model, make_optimizer(config, model), criterion, batch, config.optimizer.clip_norm)
        for name, model in models.items()
    }
    return Measurement(
        f"training step, {_size(setting)}, BatchFormerV2 off, on, duplicate",
        setting.time(steps, "training"),
        (("on", "off"), ("duplicate", "off"), ("on", "duplicate")),
        facts={
            "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
            "decoder rows": rows,
        },
    )


@torch.no_grad()
def measure_inference(setting: Setting) -> Measurement:
    """Measure the forward pass in evaluation; the model without BatchFormerV2 is timed twice to show the noise."""
    models = {name: model.eval() for name, model in _models(setting, INFERENCE).items()}
    batch = make_batch(setting)
    plain, other = models["without"](batch), models["with"](batch)
    identical = torch.equal(plain.logits, other.logits) and torch.equal(plain.boxes, other.boxes)
    return Measurement(
        f"inference, {_size(setting)}, with and without BatchFormerV2",
        setting.time({name: partial(model, batch) for name, model in models.items()}, "inference"),
        (("with", "without"), ("without, again", "without")),
        checks={"outputs with and without are bit-identical": identical},
    )


def bytes_kept(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that ``loss`` saves for the backward pass, without parameters and buffers of ``model``."""
    of_model = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict(keep_vars=True).values()}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps storages alive, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_model:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(storage.nbytes() for storage in saved.values())


def measure_matching(setting: Setting, images: int, queries: int) -> Measurement:
    """Measure the matching of one training step: the matcher's stacked cost against a cost matrix per decoder layer."""
    generator = torch.Generator().manual_seed(SEED)
    matcher = HungarianMatcher(CrossEntropy())
    outputs = _outputs(images, queries, generator, setting.device)
    made = [_target(index, generator) for index in range(images)]
    targets = PaddedTargets.of([target.copied(lambda x: x.to(setting.device)) for target in made])
    functions = {
        "stacked": partial(matcher, outputs, targets),
        "per layer": partial(match_layer_by_layer, matcher, outputs, targets),
    }
    one, other = (function() for function in functions.values())
    equal = (torch.equal(getattr(one, name), getattr(other, name)) for name in ("layer", "row", "query", "target"))
    return Measurement(
        f"matching, B = {images}, Q = {queries}, L = {MATCHING_LAYERS}, {sum(targets.counts)} objects",
        setting.time(functions, "matching"),
        (("stacked", "per layer"),),
        checks={"matches are equal": all(equal)},
    )


@torch.no_grad()
def match_layer_by_layer(matcher: HungarianMatcher, outputs: Outputs, targets: PaddedTargets) -> Matches:
    """Match like ``matcher``, but with a cost matrix and a copy to the host for every decoder layer."""
    pairs = []
    for layer in range(len(outputs.logits)):
        logits, boxes = outputs.logits[layer : layer + 1], outputs.boxes[layer : layer + 1]
        cost = matcher.cost(logits, boxes, targets)[0].cpu().numpy()
        for row, count in enumerate(targets.counts):
            query, target = linear_sum_assignment(cost[row, :, :count])
            pairs.append(np.stack([np.full_like(query, layer), np.full_like(query, row), query, target]))
    return Matches(*torch.from_numpy(np.concatenate(pairs, axis=1)).to(outputs.logits.device))


def _models(setting: Setting, variants: Mapping[str, str]) -> dict[str, Detector]:
    """Build one model per variant (name -> override), all with the weights of the first."""
    torch.manual_seed(SEED)
    models = {name: build_model(setting.preset.config(override), NUM_CLASSES) for name, override in variants.items()}
    weights = next(iter(models.values())).state_dict()
    for model in models.values():
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all(name.startswith("encoder.batch_former.") for name in missing)
    return {name: model.to(setting.device) for name, model in models.items()}


def make_optimizer(config: DetectionConfig, model: Detector) -> torch.optim.Optimizer:
    """Build the optimizer of a training run."""
    return build_optimizer(build_groups(config, model))


def setting_of(
    recipe: str, device: str, rounds: int, *overrides: str, height: int, width: int, batch_size: int
) -> Setting:
    """Return the images and the recipe, a file below ``configs``; an override may name another device."""
    preset = Preset(height, width, batch_size, (f"device={device}", *overrides), CONFIGS / f"{recipe}.yaml")
    return Setting(preset, device_of(preset.config().device), rounds)


@dataclass
class DetectorStep:
    """Training step of a detector with one batch."""

    model: Detector
    optimizer: torch.optim.Optimizer
    criterion: SetCriterion
    batch: Batch
    clip_norm: float

    def __call__(self) -> None:
        training_step(self.model, self.optimizer, self.criterion, self.batch, self.clip_norm)


def make_step(setting: Setting) -> DetectorStep:
    """Build a model with the weights of the seed, and return its training step."""
    config = setting.preset.config()
    torch.manual_seed(SEED)
    model = build_model(config, NUM_CLASSES).to(setting.device).train()
    optimizer, criterion = make_optimizer(config, model), build_criterion(config)
    return DetectorStep(model, optimizer, criterion, make_batch(setting), config.optimizer.clip_norm)


def training_step(
    model: Detector, optimizer: torch.optim.Optimizer, criterion: SetCriterion, batch: Batch, clip_norm: float
) -> None:
    """Run forward pass, loss, backward pass, clipping and optimiser step."""
    criterion(model(batch), batch.targets).total.backward()
    update(model, optimizer, clip_norm)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float,
    scaler: torch.amp.GradScaler = NO_SCALING,
) -> None:
    """Run clipping and optimiser step; the gradients are removed."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm or torch.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def make_batch(setting: Setting) -> Batch:
    """Build a batch whose images become smaller, so that there is padding."""
    preset, generator = setting.preset, torch.Generator().manual_seed(SEED)
    samples = []
    for index in range(preset.batch_size):
        share = 1 - 0.25 * index / preset.batch_size
        size = (round(share * preset.height), round(share * preset.width))
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
        samples.append((image, _target(index, generator, size)))
    return Batch.collate(samples).to(setting.device)


def _target(index: int, generator: torch.Generator, size: tuple[int, int] = (1, 1)) -> Target:
    """Draw objects of random classes with boxes inside the image."""
    count = OBJECTS[index % len(OBJECTS)]
    extent = 0.05 + 0.45 * torch.rand(count, 2, generator=generator)
    centre = extent / 2 + (1 - extent) * torch.rand(count, 2, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    return Target(index, torch.cat([centre, extent], 1), labels, size, size)


def _outputs(images: int, queries: int, generator: torch.Generator, device: torch.device) -> Outputs:
    def random(last: int) -> Tensor:
        return torch.randn(MATCHING_LAYERS, images, queries, last, generator=generator).to(device)

    return Outputs(random(NUM_CLASSES + 1), random(4).sigmoid())


def _size(setting: Setting) -> str:
    return f"B = {setting.preset.batch_size}, {setting.preset.height} x {setting.preset.width} pixels"
