"""Detectors against those of Hugging Face transformers with the same weights, and against onnxruntime.

    python benchmarks/peers.py --what inference --rounds 20 --output inference.json
    python benchmarks/peers.py --what training streams --rounds 8 --output training.json

``inference`` is the forward pass of one image in evaluation, ``training`` the step: forward pass, loss, backward pass,
clipping and AdamW. transformers runs eagerly with its default attention; its images are normalised beforehand. Weights
are random; outputs, and losses without dropout and auxiliary layers, are compared before the timing. ``streams`` is a
step with BatchFormerV2 against one without, and against the time that its rows alone would take: that of each part
without it, times the rows of the part with it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cases import NUM_CLASSES, SEED, Setting, make_batch, make_optimizer, setting_of, training_step, update
from command import cells, make_parser, print_header, run_benchmark, write_record
from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.assembly import build_criterion, build_model
from detr_bf.assembly.model import build_postprocess
from detr_bf.backbones.backbone import normalize
from detr_bf.common.structures import Batch, ClassMap, Outputs
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.config import DetectionConfig, config_to_dict
from detr_bf.detectors import Detector
from detr_bf.export import export_detector
from detr_bf.export.graph import Exported, ExportSignature
from detr_bf.export.runtime import OnnxDetector
from detr_bf.interop.transformers_folder import in_order_of, transformers_library, write_transformers_folder
from detr_bf.losses import SetCriterion
from step import Step

TRAINED = ("detr_r50", "conditional_detr_r50", "deformable_detr_r50")  # one loss in both libraries
DETECTORS = (
    *TRAINED,
    "deformable_detr_r50_two_stage",
    "dab_detr_r50",
    "rtdetr_r18",
    "rtdetr_r50",
    "dfine_n",
    "dfine_s",
    "dfine_l",
)
OURS, THEIRS, ONNX = "ours", "transformers", "onnxruntime"
OURS_HALF, THEIRS_HALF = f"{OURS}-bf16", f"{THEIRS}-bf16"
WAYS = (OURS, THEIRS, ONNX, OURS_HALF, THEIRS_HALF)
OFF, MODES = "off", {"on": "two_stream", "duplicate": "duplicate"}
STREAMS = {
    OFF: "batch_former.enabled=false",
    **{mode: f"batch_former={{enabled: true, mode: {key}}}" for mode, key in MODES.items()},
}
DOUBLED = ("decoder", "matching", "loss")  # parts of a step with twice the rows
PARTS = ("backbone", "encoder", *DOUBLED, "optimizer")
CLASSES = ClassMap(tuple(range(NUM_CLASSES)), tuple(f"class {number}" for number in range(NUM_CLASSES)))
Outcome = tuple[Tensor, Tensor]  # logits (B, Q, K) and boxes (B, Q, 4) of the last layer


@dataclass(frozen=True)
class Row:
    """Time of one way to compute a detector."""

    case: str  # detector, pixels and batch size
    way: str
    seconds: Spread
    ratio: Spread  # time / that of the baseline in the same round: transformers, or the step without BatchFormerV2
    facts: dict[str, float]

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value:.2g}" for name, value in self.facts.items())
        return f"| {self.case} | {self.way} | {1000 * self.seconds.median:.0f} | {cells(self.ratio)} {facts} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=10, devices=("cpu", "cuda"))
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=("inference",), help="default inference")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=DETECTORS, metavar="NAME", help="all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of inference; transformers is always on")
    parser.add_argument("--sizes", nargs="+", metavar="HxW", help="default 640x640 800x1333; of a step 480x640")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(2, 4), metavar="B", help="of a step")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all detectors")
    return run_benchmark(run, parser.parse_intermixed_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure; print and write row by row, so that an interruption keeps finished rows."""
    transformers_library().utils.logging.disable_progress_bar()
    versions = {name: version(name) for name in ("transformers", "onnxruntime")}
    rows: list[dict[str, Any]] = []
    if options.device == "cpu" and "inference" not in options.what:
        keep_freed_memory(large=True)  # as our training does; here also for transformers
    for what in options.what:
        print()
        print_header(what, "way", "ms", "/ baseline", "10th to 90th", "")
        for name in options.detectors:
            for row in MEASURES[what](name, options) if what == "inference" or name in TRAINED else ():
                print(row, flush=True)
                rows.append({"what": what, **asdict(row)})
                write_record(options, **versions, rows=rows)
            gc.collect()
    return 0


def settings(
    name: str, options: argparse.Namespace, *overrides: str, suffix: str = "", step: bool = False
) -> Iterator[tuple[str, Setting]]:
    """Yield a title and the images and recipe of a detector, for every size and, of a training step, batch size."""
    folder = "dfine" if name.startswith("dfine_") else name.partition("_r")[0]
    recipe = f"{folder}/{name}{suffix}"
    sizes = options.sizes or (("480x640",) if step else ("640x640", "800x1333"))
    for size, batch_size in product(sizes, options.batch_sizes if step else (1,)):
        height, width = map(int, size.split("x"))
        title = f"{name}, {height} x {width}" + (f", B = {batch_size}" if step else "")
        changes = (*options.overrides, *overrides)
        yield (
            title,
            setting_of(
                recipe, options.device, options.rounds, *changes, height=height, width=width, batch_size=batch_size
            ),
        )


def random_model(config: DetectionConfig) -> Detector:
    """Build the detector with random weights from the fixed seed, also where zeros would hide its input."""
    torch.manual_seed(SEED)
    model = build_model(config, NUM_CLASSES).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.01)
    return model


def peer_of(model: Detector, config: DetectionConfig, **changes: Any) -> nn.Module:
    """Return the detector of transformers with the weights of ``model``; ``changes`` are settings of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_transformers_folder(Path(folder), model, CLASSES, config_to_dict(config))
        peer: nn.Module = transformers_library().AutoModelForObjectDetection.from_pretrained(folder, **changes)
    return peer.eval()


def peer_inputs(model: Detector, batch: Batch) -> dict[str, Tensor]:
    """Return what the image processors of transformers return: pixels, and for normalised ones a mask."""
    mean, std = (getattr(model.backbone, name) for name in ("mean", "std"))
    inputs = {"pixel_values": normalize(batch.images, batch.padding_mask, mean, std).contiguous()}
    return {**inputs, "pixel_mask": (~batch.padding_mask).long()} if mean.any() else inputs


def rows_of(
    title: str, seconds: Mapping[str, Sequence[float]], baseline: str, facts: Mapping[str, dict[str, float]]
) -> Iterator[Row]:
    """Summarise the times of all ways."""
    for way, times in seconds.items():
        yield Row(title, way, Spread.of(times), Spread.of(paired_ratios(seconds, way, baseline)), facts.get(way, {}))


# ---- inference ----


@torch.no_grad()
def inference(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Compare the outputs of all ways and time them in turn, for every size."""
    cases = list(settings(name, options))
    config = cases[0][1].preset.config()
    model = random_model(config)
    peer = peer_of(model, config)
    exported = onnx_of(model, config) if ONNX in options.ways and options.device == "cpu" else None
    model, peer = model.to(options.device), peer.to(options.device)
    for title, setting in cases:
        size, generator = (setting.preset.height, setting.preset.width), torch.Generator().manual_seed(SEED)
        if name.startswith(("rtdetr", "dfine")) and any(side % 32 for side in size):  # its coarsest stride
            continue
        pixels = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8, generator=generator)
        batch = Batch(pixels, torch.zeros(1, *size, dtype=torch.bool)).to(setting.device)
        ours, theirs = partial(last_layer, model, batch), partial(peer_outputs, peer, peer_inputs(model, batch))
        ways: dict[str, Callable[[], Outcome]] = {OURS: ours, THEIRS: theirs}
        ways |= {} if exported is None else {ONNX: partial(last_layer, exported, batch)}
        half = torch.autocast(options.device, torch.bfloat16)
        ways |= {OURS_HALF: half(ours), THEIRS_HALF: half(theirs)}
        ways = {way: function for way, function in ways.items() if way in (THEIRS, *options.ways)}
        found = {way: function() for way, function in ways.items()}
        differences = {way: output_difference(found[way], found[THEIRS]) for way in ways if way != THEIRS}
        yield from rows_of(title, setting.time(ways, title, warmup=1), THEIRS, differences)


def output_difference(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest difference of the logits and of the boxes, each query against the most similar one."""
    pairs = zip(("logits", "boxes"), in_order_of(expected, *found), expected, strict=True)
    return {name: (one - other).abs().max().item() for name, one, other in pairs}


def onnx_of(model: Detector, config: DetectionConfig) -> OnnxDetector:
    """Export the detector for one image of any size; onnxruntime computes it with as many threads as torch has."""
    values = config_to_dict(config)
    exported = Exported(model, CLASSES, lambda sample: sample, build_postprocess(config), None, values)
    image = torch.randint(0, 256, (3, 256, 320), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peer.onnx"
        export_detector(path, exported, ExportSignature(batch=1), [(image, None)], source="synthetic")
        return OnnxDetector(str(path), path.name)


def last_layer(model: Callable[[Batch], Outputs], batch: Batch) -> Outcome:
    """Return logits and boxes of our detector."""
    outputs = model(batch)
    return outputs.logits[-1], outputs.boxes[-1]


def peer_outputs(peer: Any, inputs: Mapping[str, Tensor]) -> Outcome:
    """Return logits and boxes of the detector of transformers."""
    output = peer(**inputs)
    return output.logits, output.pred_boxes


# ---- training ----


def training(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Compare the losses and time the training steps in turn, for every size and batch size."""
    # transformers does not weight its class loss
    for title, setting in settings(name, options, "loss.class_weight=1", step=True):
        config = setting.preset.config()
        model = random_model(config)
        peer = peer_of(model, config, **peer_settings(config))
        freeze_like(model, peer)
        model, peer = model.to(setting.device), peer.to(setting.device)
        criterion, batch = build_criterion(config), make_batch(setting)
        labels = [{"class_labels": each.labels, "boxes": each.boxes} for each in batch.targets]
        inputs = {**peer_inputs(model, batch), "labels": labels}
        difference = {OURS: {"loss": loss_difference(model, peer, criterion, batch, inputs)}}
        optimizer, clip = make_optimizer(config, model), config.optimizer.clip_norm
        steps = {
            OURS: partial(training_step, model.train(), optimizer, criterion, batch, clip),
            THEIRS: partial(peer_step, peer.train(), peer_optimizer(config, peer), inputs, clip),
        }
        yield from rows_of(title, setting.time(steps, title, warmup=1), THEIRS, difference)
        del model, peer, optimizer, steps
        gc.collect()


def freeze_like(model: Detector, peer: nn.Module) -> None:
    """Freeze the stages of the backbone of ``peer`` that are frozen in ``model``."""
    body = model.get_submodule("backbone.body")
    frozen = tuple(f"backbone.model.{name}" for name, each in body.named_parameters() if not each.requires_grad)
    for name, parameter in peer.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    ours, theirs = (sum(x.numel() for x in each.parameters() if x.requires_grad) for each in (model, peer))
    assert ours == theirs, f"{ours} and {theirs} parameters are trained"


def peer_settings(config: DetectionConfig) -> dict[str, Any]:
    """Return the settings of transformers for dropout and losses; its costs and weights are whole numbers."""
    loss, dropouts = config.loss, ("dropout", "attention_dropout", "activation_dropout")
    is_detr = config.model.name == "detr"
    return {
        **dict.fromkeys(dropouts, config.model.dropout),
        **{name: int(getattr(loss.matcher, name)) for name in ("class_cost", "bbox_cost", "giou_cost")},
        "auxiliary_loss": config.model.aux_loss,
        "bbox_loss_coefficient": int(loss.bbox_weight),
        "giou_loss_coefficient": int(loss.giou_weight),
        **({"eos_coefficient": loss.no_object_weight} if is_detr else {"focal_alpha": loss.focal_alpha}),
    }


@torch.no_grad()
def loss_difference(
    model: Detector, peer: Any, criterion: SetCriterion, batch: Batch, inputs: Mapping[str, Any]
) -> float:
    """Return the relative difference of the losses of the last layer, in evaluation.

    The auxiliary losses of DETR and Conditional DETR differ, as transformers passes normalised states to the next
    layer when they are on.
    """
    report = criterion(model.eval()(batch), batch.targets)
    ours = sum(weight * report.losses[term].item() for term, weight in report.term_weights.items())
    auxiliary, peer.config.auxiliary_loss = peer.config.auxiliary_loss, False
    theirs: float = peer.eval()(**inputs).loss.item()
    peer.config.auxiliary_loss = auxiliary
    return abs(ours - theirs) / abs(theirs)


def peer_optimizer(config: DetectionConfig, peer: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW as ours, with the learning rate of the backbone."""
    rates = {True: config.optimizer.backbone_lr, False: config.optimizer.lr}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in peer.named_parameters():
        groups[".backbone." in name] += [parameter] if parameter.requires_grad else []
    rated = [{"params": parameters, "lr": rates[key]} for key, parameters in groups.items()]
    return torch.optim.AdamW(rated, weight_decay=config.optimizer.weight_decay, fused=True)


def peer_step(peer: Any, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any], clip_norm: float) -> None:
    """Run forward pass, loss, backward pass, clipping and optimiser step."""
    peer(**inputs).loss.backward()
    update(peer, optimizer, clip_norm)


# ---- streams ----


def streams(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Time the parts of a step with and without BatchFormerV2 in turn, for every size and batch size."""
    variants = [settings(name, options, override, suffix="_bfv2", step=True) for override in STREAMS.values()]
    for cases in zip(*variants, strict=True):
        title, setting = cases[0]
        steps = {mode: Step(each, "float32") for mode, (_, each) in zip(STREAMS, cases, strict=True)}
        noted: dict[str, list[dict[str, float]]] = {mode: [] for mode in STREAMS}
        seconds = setting.time({mode: partial(_note, steps[mode], noted[mode]) for mode in STREAMS}, title, warmup=1)
        rows = {**dict.fromkeys(DOUBLED, 2.0), "encoder": encoder_rows(steps["on"])}
        facts = {mode: stream_facts(noted[mode][1:], noted[OFF][1:], rows) for mode in MODES}
        yield from rows_of(title, seconds, OFF, facts)
        del steps
        gc.collect()


def stream_facts(
    parts: Sequence[Mapping[str, float]], off: Sequence[Mapping[str, float]], rows: Mapping[str, float]
) -> dict[str, float]:
    """Return the cost of a mode in multiples of the step without it, from the seconds of the parts of all rounds.

    ``by rows`` is the multiple if each part took time in proportion to its ``rows``, ``excess`` the difference of the
    measured multiple from it; then batch attention, and each part in multiples of the same part.
    """
    totals = [sum(each.values()) for each in off]
    by_rows = [sum(rows.get(part, 1.0) * time for part, time in each.items()) for each in off]
    more = [sum(each.values()) - expected for each, expected in zip(parts, by_rows, strict=True)]
    excess = Spread.of([each / total for each, total in zip(more, totals, strict=True)])
    batch_attention = [each.get("BatchFormer", 0.0) / total for each, total in zip(parts, totals, strict=True)]
    return {
        "by rows": statistics.median(each / total for each, total in zip(by_rows, totals, strict=True)),
        "excess": excess.median,
        "excess, 10th": excess.low,
        "excess, 90th": excess.high,
        "batch attention": statistics.median(batch_attention),
        "rows of the encoder": rows["encoder"],
        **{part: statistics.median(x[part] / y[part] for x, y in zip(parts, off, strict=True)) for part in PARTS},
    }


def encoder_rows(step: Step) -> float:
    """Return the mean number of rows of the encoder layers in training, divided by the number of images."""
    encoder: Any = step.model.encoder
    inserted = encoder.batch_former
    single = inserted.insertions[0] + (inserted.position == "after")
    return float(2 - single / len(encoder.layers))


def _note(step: Step, parts: list[dict[str, float]]) -> None:
    parts.append(step())


MEASURES = {"inference": inference, "training": training, "streams": streams}

if __name__ == "__main__":
    sys.exit(main())
