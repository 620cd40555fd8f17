"""Detect without torch: python onnx_numpy.py model.onnx photo.jpg drawn.png [reference.jpg, if the file reads one]."""

import json
import sys

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageDraw, ImageOps


def resized_size(width: int, height: int, rule: dict) -> tuple[int, int]:
    """Return width and height of the input of the detector."""
    if rule["rule"] == "square":
        return rule["side"], rule["side"]
    if rule["rule"] == "fit":
        limits = rule["width"], rule["height"]
        scale = min(limits[0] / width, limits[1] / height)
        return tuple(min(limit, max(1, round(s * scale))) for limit, s in zip(limits, (width, height), strict=True))
    short, long, side = min(width, height), max(width, height), rule["side"]
    if long / short * side > rule["longest"]:
        side = max(1, round(rule["longest"] * short / long))
    return (side * width // short, side) if width >= height else (side, side * height // short)


def detections(found: dict, softmax: bool, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scores, labels and boxes (x0, y0, x1, y1 in fractions of the image) of the first image, best first."""
    if "scores" in found:
        return tuple(found[name][0] for name in ("scores", "labels", "boxes"))
    logits, (x, y, w, h) = found["logits"][0].astype(np.float64), found["boxes"][0].T
    boxes = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1)
    if softmax:  # the last class is no object; each query has one class
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = (powers / powers.sum(1, keepdims=True))[:, :-1]
        best = np.argsort(-scores.max(1), kind="stable")[:limit]
        return scores.max(1)[best], scores.argmax(1)[best], boxes[best]
    scores = 1 / (1 + np.exp(-logits))
    query, label = np.divmod(np.argsort(-scores.ravel(), kind="stable")[:limit], scores.shape[1])
    return scores[query, label], label, boxes[query]


def without_duplicates(scores: np.ndarray, labels: np.ndarray, boxes: np.ndarray, most: float) -> list[int]:
    """Return the detections, best first, whose IoU with each better one of their class is at most ``most``."""
    kept: list[int] = []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    for index in np.argsort(-scores, kind="stable").tolist():
        better = [other for other in kept if labels[other] == labels[index]]
        sides = np.minimum(boxes[better, 2:], boxes[index, 2:]) - np.maximum(boxes[better, :2], boxes[index, :2])
        shared = sides.clip(min=0).prod(1)
        if (shared <= most * (areas[better] + areas[index] - shared)).all():
            kept.append(index)
    return kept


model, photo, output, *reference = sys.argv[1:]
session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
with_reference = "references" in [each.name for each in session.get_inputs()]
if with_reference != bool(reference):
    sys.exit("this file reads a reference: give one" if with_reference else "this file reads no reference: give none")
meta = {k: v if k == "format" else json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
image, *others = (ImageOps.exif_transpose(Image.open(file)).convert("RGB") for file in (photo, *reference))
if any(other.size != image.size for other in others):
    sys.exit(f"the reference has {others[0].size} pixels and its image {image.size}: give one of the same size")
width, height = resized_size(*image.size, meta["resize"])
shape = (meta["form"]["batch"] or 1, 3, *(meta["form"]["size"] or (height, width)))
feeds = {"sizes": np.array([(height, width)] * shape[0], np.int64)}
for name, picture in zip(("images", "references"), (image, *others), strict=False):
    feeds[name] = np.zeros(shape, np.uint8)
    small = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    feeds[name][:, :, :height, :width] = small.transpose(2, 0, 1)
values = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
found, draw = dict(zip((each.name for each in session.get_outputs()), values, strict=True)), ImageDraw.Draw(image)
scores, labels, boxes = detections(found, meta["scores"] == "softmax", meta["max_detections"])
if meta["nms"] is not None:
    kept = without_duplicates(scores, labels * (not meta["nms_across_classes"]), boxes, meta["nms"])
    scores, labels, boxes = scores[kept], labels[kept], boxes[kept]
for score, label, box in zip(scores, labels, boxes * [*image.size, *image.size], strict=True):
    if score >= meta["threshold"]:
        print(f"{meta['classes'][label]} {score:.3f} {' '.join(f'{value:.1f}' for value in box)}")
        draw.rectangle([*np.minimum(box[:2], box[2:]), *box[2:]], outline="red", width=2)
        draw.text(tuple(box[:2]), f"{meta['classes'][label]} {score:.2f}", fill="red")
image.save(output)
