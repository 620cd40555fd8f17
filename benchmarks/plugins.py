"""Cost of each plug-in: training step and evaluation of a ViT with it, relative to the plain ViT.

python benchmarks/plugins.py --output benchmarks/results/plugins_cpu.json
python benchmarks/plugins.py --device cuda --rounds 50 --output plugins.json train.precision=bf16
python benchmarks/plugins.py --only relative_localization_abs context_broadcasting_all --rounds 100
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from cases import SEED, update
from command import make_parser, print_header, run_benchmark, write_record
from detr_bf.assembly.compilation import compile_model
from detr_bf.assembly.training import PRECISIONS
from detr_bf.classification.assembly import build_classifier, build_classifier_criterion, image_optimizer
from detr_bf.classification.assembly_data import build_mix
from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.config import ClassifierConfig
from detr_bf.common.devices import device_of
from detr_bf.common.timing import Seconds, Spread, alternate, paired_ratios
from detr_bf.config import load_config
from detr_bf.engine import TrainingStep

NUM_CLASSES = 1000  # as ImageNet
DEFAULTS = {"cpu": ("deit_tiny_patch16_224", 4), "cuda": ("deit_small_patch16_224", 64)}  # model, images
PLAIN, AGAIN = "plain", "plain_again"


@dataclass(frozen=True)
class Variant:
    """A model with a plug-in."""

    settings: tuple[str, ...] = ()  # key=value, differences from the plain model
    evaluated: bool = False  # time the evaluation, too
    published: str = ""  # published cost of a training step


def _with(plugin: str, *settings: str, evaluated: bool = False, published: str = "") -> Variant:
    return Variant(
        tuple(f"plugins.{plugin}.{setting}" for setting in ("enabled=true", *settings)), evaluated, published
    )


VARIANTS = {
    AGAIN: Variant(evaluated=True),
    "batchformer_v2": _with("batchformer_v2", evaluated=True),
    "batchformer_v2_all": _with("batchformer_v2", "layers=all", evaluated=True),
    "batchformer_v2_duplicate": _with("batchformer_v2", "mode=duplicate"),
    "batchformer": _with("batchformer"),
    "context_broadcasting_upper": _with("context_broadcasting", evaluated=True, published="negligible"),
    "context_broadcasting_all": _with("context_broadcasting", "layers=all", evaluated=True, published="negligible"),
    "context_broadcasting_scaled": _with(
        "context_broadcasting", "layers=all", "scaled=true", evaluated=True, published="negligible"
    ),
    "diverse_patch": _with("diverse_patch"),
    "relative_localization_abs": _with("relative_localization", published="1.0243 or less"),
    "relative_localization_ce": _with("relative_localization", "variant=ce"),
    "relative_localization_all": _with("relative_localization", "variant=all"),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    timed: str  # training step or evaluation
    variant: str
    ratio: Spread  # time / time of the plain model in the same round
    published: str

    def __str__(self) -> str:
        spread = f"{self.ratio.median:.3f} | {self.ratio.low:.3f} to {self.ratio.high:.3f}"
        return f"| {self.timed} | {self.variant} | {spread} | {self.published} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=30)
    (small, few), (large, many) = DEFAULTS["cpu"], DEFAULTS["cuda"]
    parser.add_argument("--model", metavar="NAME", help=f"a ViT of timm; default {small}, on CUDA {large}")
    parser.add_argument("--batch-size", type=int, metavar="B", help=f"default {few}, on CUDA {many}")
    parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="default %(default)s")
    names = ", ".join(VARIANTS)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME", help=f"of {names}")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all models")
    options = parser.parse_intermixed_args(arguments)
    gc.freeze()  # shorten garbage collections, which may happen in a timed step
    try:
        return run_benchmark(run, options)
    finally:
        gc.unfreeze()


def run(options: argparse.Namespace) -> int:
    """Measure; print and write row by row, so that an interruption keeps finished rows."""
    kind = device_of(load_config(None, [f"device={options.device}"], task="classification").device).type
    model, batch_size = DEFAULTS[kind]
    options.model = options.model or model
    options.batch_size = batch_size if options.batch_size is None else options.batch_size
    size = f"{options.batch_size} images of {options.image_size} pixels"
    print(f"{options.model}, {size}, {kind}, torch {torch.__version__}")
    print()
    print_header("", "", "time / plain's", "10th to 90th", "published")
    rows, times = [], {}
    for row, seconds in measure(options):
        print(row, flush=True)
        rows.append(asdict(row))
        times[f"{row.timed}, {row.variant}"] = seconds
        write_record(options, rows=rows, seconds=times)
    return 0


def measure(options: argparse.Namespace) -> Iterator[tuple[Row, Seconds]]:
    """Measure the training step with each variant, then the evaluation, each in turn with the plain model."""
    evaluated = [name for name in options.only if VARIANTS[name].evaluated]
    for timed, make, names in (("training step", Step, options.only), ("evaluation", Evaluation, evaluated)):
        if not names:
            continue
        plain = make(make_config(options))
        wait = torch.cuda.synchronize if plain.device.type == "cuda" else lambda: None
        for name in names:
            variant = VARIANTS[name]
            functions = {PLAIN: plain, name: make(make_config(options, variant.settings))}
            seconds = alternate(functions, options.rounds, synchronize=wait, description=f"{timed}, {name}")
            published = variant.published if make is Step else ""
            yield Row(timed, name, Spread.of(paired_ratios(seconds, name, PLAIN)), published), seconds
            del functions
            gc.collect()


def make_config(options: argparse.Namespace, settings: Sequence[str] = ()) -> ClassifierConfig:
    """Return DeiT's recipe with the options and the ``settings`` of a variant."""
    given = {
        "device": options.device,
        "model.name": options.model,
        "train.batch_size": options.batch_size,
        "data.transforms.size": options.image_size,
    }
    overrides = [f"{key}={value}" for key, value in given.items()]
    return load_config(None, [*overrides, *options.overrides, *settings], task="classification")


def make_network(config: ClassifierConfig) -> nn.Module:
    """Build the network with its plug-ins; its own weights are the same in all variants."""
    torch.manual_seed(SEED)
    network = build_classifier(config, NUM_CLASSES)
    compile_model(network, config)
    return network.to(device_of(config.device))


def make_batch(config: ClassifierConfig) -> LabelledImages:
    """Return random images and labels on the device."""
    generator, size, images = torch.Generator().manual_seed(SEED), config.data.transforms.size, config.train.batch_size
    pixels = torch.randn(images, 3, size, size, generator=generator)
    labels = torch.randint(NUM_CLASSES, (images,), generator=generator)
    return LabelledImages(pixels, ClassTargets(labels), torch.arange(images)).to(device_of(config.device))


class Step:
    """A training step as in the trainer; the batch is mixed again in each step."""

    def __init__(self, config: ClassifierConfig) -> None:
        self.device = device_of(config.device)
        self.network = make_network(config).train()
        criterion = build_classifier_criterion(config, self.network, [1] * NUM_CLASSES).to(self.device)
        self.step = TrainingStep(self.network, criterion, self.device, PRECISIONS[config.train.precision])
        self.optimizer = image_optimizer(config, self.network)
        self.clip_norm = config.optimizer.clip_norm
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.step.precision == torch.float16)
        self.mix = build_mix(config, NUM_CLASSES)
        self.batch = make_batch(config)
        self.seeds = itertools.count(SEED)

    def __call__(self) -> None:
        """Run one step."""
        batch = self.batch if self.mix is None else self.mix(self.batch, next(self.seeds))
        self.scaler.scale(self.step(batch).total).backward()
        update(self.network, self.optimizer, self.clip_norm, self.scaler)


class Evaluation:
    """The forward pass in evaluation."""

    def __init__(self, config: ClassifierConfig) -> None:
        self.device = device_of(config.device)
        self.network = make_network(config).eval()
        self.precision = PRECISIONS[config.train.precision]
        self.images = make_batch(config).images

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return logits (B, K)."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            logits: Tensor = self.network(self.images)
        return logits


if __name__ == "__main__":
    sys.exit(main())
