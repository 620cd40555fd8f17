"""A trained detector finds the same objects however its images are grouped, padded or exported (the demo's; slow)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import detr_bf
from detr_bf.commands import command_main
from detr_bf.common.structures import Batch, Detections, Target
from detr_bf.data.samples import build_digits
from detr_bf.data.transforms import eval_sample
from detr_bf.evaluation import CocoEvaluator
from detr_bf.inference.predictor import Predictor

pytestmark = pytest.mark.slow  # trains for minutes

CROPS = ((92, 128), (128, 92))  # height, width; 92 is no multiple of 16, the coarsest stride of the demo
COUNT = 400  # validation images, each with both crops; the AP of half of them differs by 0.0053 between groupings
LEAST_VISIBLE = 0.3  # share of an object within a crop; the others are not counted
TOLERANCE = 0.005  # of AP


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_digits(tmp_path_factory.mktemp("sizes") / "digits")


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the best checkpoint of ``make demo``."""
    run = tmp_path_factory.mktemp("run") / "demo"
    paths = [
        f"data.{split}.{key}={digits / split}{end}"
        for split in ("train", "val")
        for key, end in (("images", ""), ("annotations", ".json"))
    ]
    assert command_main("train")(["demo", f"output_dir={run}", *paths]) == 0
    return run / "best.pt"


@pytest.fixture(scope="module")
def crops(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Return image files, alternately of both sizes, and their annotations; the crops are central."""
    folder = tmp_path_factory.mktemp("crops")
    whole = json.loads((digits / "val.json").read_text())
    files: list[Path] = []
    found: dict[str, Any] = {"images": [], "annotations": [], "categories": whole["categories"]}
    for image in whole["images"][:COUNT]:
        with Image.open(digits / "val" / image["file_name"]) as opened:
            for height, width in CROPS:
                left, top = (opened.width - width) // 2, (opened.height - height) // 2
                files.append(folder / f"{len(files) + 1}.png")
                opened.crop((left, top, left + width, top + height)).save(files[-1])
                size = {"height": height, "width": width, "file_name": files[-1].name}
                found["images"].append({"id": len(files), **size})
                for each in whole["annotations"]:
                    if each["image_id"] != image["id"]:
                        continue
                    x, y, w, h = each["bbox"]
                    x0, y0 = max(x - left, 0), max(y - top, 0)
                    part = [x0, y0, min(x - left + w, width) - x0, min(y - top + h, height) - y0]
                    if min(part[2:]) > 0 and part[2] * part[3] >= LEAST_VISIBLE * w * h:
                        own = {"id": len(found["annotations"]) + 1, "image_id": len(files), "bbox": part}
                        found["annotations"].append({**each, **own, "area": part[2] * part[3]})
    (folder / "crops.json").write_text(json.dumps(found))
    return files, folder / "crops.json"


def beside_a_large_one(detector: Predictor, files: list[Path]) -> Iterator[Detections]:
    """Yield the detections of each image in a batch with a black one of 256 x 192 pixels."""
    large = torch.zeros(3, 192, 256, dtype=torch.uint8), Target.without_objects()
    for number, file in enumerate(files):
        with Image.open(file) as opened:
            pixels = torch.frombuffer(bytearray(opened.convert("RGB").tobytes()), dtype=torch.uint8)
            image: Tensor = pixels.view(opened.height, opened.width, 3).permute(2, 0, 1).contiguous()
        batch = Batch.collate([eval_sample(detector.transform, image, number), large])
        yield detector.backend.compute(batch, detector.postprocess, half=False)[0]


def test_groupings_exports_and_padding_have_the_same_ap(
    trained: Path, crops: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """The server computes batches by ``predict`` as well, of the images that wait at a time."""
    files, annotations = crops
    detector = detr_bf.load(trained, device="cpu")

    def ap(found: Iterable[Detections]) -> float:
        evaluator = CocoEvaluator(annotations, detector.class_map, max_detections=100)
        evaluator.update([Detections(each.image_id + 1, each.boxes, each.scores, each.labels) for each in found])
        return evaluator.summarize().AP or 0.0

    portrait_last = sorted(range(len(files)), key=lambda number: number % len(CROPS))
    found = {
        "one by one": ap(detector.predict(files, threshold=0.0)),
        "batches of both sizes": ap(detector.predict(files, 8, threshold=0.0)),
        "batches of one size": ap(
            Detections(number, each.boxes, each.scores, each.labels)
            for number, each in zip(
                portrait_last, detector.predict([files[number] for number in portrait_last], 8, 0.0), strict=True
            )
        ),
        "beside a large one": ap(beside_a_large_one(detector, files)),
    }
    for suffix in ("onnx", "xml"):
        pytest.importorskip("onnxruntime" if suffix == "onnx" else "openvino")
        for name, size in (("dynamic", None), ("fixed", (128, 128))):
            file = tmp_path / f"{name}.{suffix}"
            detector.export(file, size=size)
            for count in (1, 8):
                found[f"{file.name}, batches of {count}"] = ap(detr_bf.load(file).predict(files, count, 0.0))
    assert found["one by one"] > 0.5, found
    assert max(abs(value - found["one by one"]) for value in found.values()) <= TOLERANCE, found
