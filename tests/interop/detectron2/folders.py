"""Data sets on disk that detectron2's own readers would stumble over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from PIL import Image
from pycocotools import mask as coco_mask

from detr_bf.data.masks import read_ids

IDS = {3: 150, 7: 90, 100: 2, 120: 120}  # things and stuff mixed, none at the front; 150 has crowds


def as_bmp(data: SimpleNamespace) -> SimpleNamespace:
    """The same data set with BMP files for images."""
    for image in data.content["images"]:
        old = data.images / image["file_name"]
        image["file_name"] = old.with_suffix(".bmp").name
        Image.open(old).save(data.images / image["file_name"])
        old.unlink()
    data.save()
    return data


def scattered(data: SimpleNamespace) -> SimpleNamespace:
    """A panoptic data set whose things lie between stuff, its categories in no order, its images BMP files."""
    for annotation in data.content["annotations"]:
        for segment in annotation["segments_info"]:
            segment["category_id"] = IDS[segment["category_id"]]
    for category in data.content["categories"]:
        category["id"] = IDS[category["id"]]
    return as_bmp(data)


def with_masks(data: SimpleNamespace, kind: str = "polygon", crowd: bool = False) -> SimpleNamespace:
    """A detection data set whose masks fill the boxes; with ``crowd`` the last object of each image is one."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in data.content["images"]}
    last = {annotation["image_id"]: annotation for annotation in data.content["annotations"]}
    for annotation in data.content["annotations"]:
        x, y, w, h = annotation["bbox"]
        polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
        annotation["iscrowd"] = int(crowd and annotation is last[annotation["image_id"]])
        annotation["segmentation"] = [polygon]
        if kind == "run lengths" or annotation["iscrowd"]:
            code: dict[str, Any] = coco_mask.frPyObjects([polygon], *sizes[annotation["image_id"]])[0]
            annotation["segmentation"] = {"size": code["size"], "counts": code["counts"].decode()}
    data.save()
    return data


def segment_ids(data: SimpleNamespace, place: int) -> Any:
    """(h, w) int32 of the panoptic PNG of an image."""
    return read_ids(data.panoptic / data.content["annotations"][place]["file_name"])
