"""Registration of COCO files as detectron2 data sets, for its loaders, evaluators and visualiser.

The metadata are complete at registration; the annotations are read again on demand. Paths are made absolute.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed
from detr_bf.data.annotation_values import annotated_size, annotation_values, is_id
from detr_bf.data.coco import CocoAnnotations, check_maps, read_annotations
from detr_bf.data.images import check_folder
from detr_bf.data.masks import MapFile

logger = logging.getLogger(__name__)

IGNORE_LABEL = 255  # detectron2's label of pixels without a class
LABEL_DIVISOR = 1000  # detectron2's constant for panoptic maps without a list of segments
_OF_SEGMENTS = ("id", "area", "bbox", "iscrowd")

Records = list[dict[str, Any]]


def register_coco(name: str, images: str | Path, annotations: str | Path) -> None:
    """Register a COCO detection file under ``name``; repeating the call with the same arguments has no effect.

    Class k is the k-th category by ascending id.

    Args:
        name: for ``DATASETS.TRAIN`` and ``DATASETS.TEST``.
        images: folder of the image files, of any format.
        annotations: COCO JSON.

    Raises:
        InputError: a path is missing, the file is not COCO or lacks fields that detectron2 reads, or the name is
            taken by another data set.
    """
    folder, path = _absolute(images), _absolute(annotations)
    content = _read(folder, path)
    if content.maps is not None:
        raise InputError(f"{path} is a COCO panoptic file: register it with register_coco_panoptic")
    _check_for_detectron2(content)
    class_map = content.class_map
    metadata = {
        "evaluator_type": "coco",
        "image_root": str(folder),
        "json_file": str(path),
        "thing_classes": list(class_map.distinct_names),
        "thing_dataset_id_to_contiguous_id": dict(class_map.index),
    }
    _register(name, partial(_detection_records, folder, path, class_map.index), metadata)


def register_coco_panoptic(name: str, images: str | Path, annotations: str | Path, panoptic: str | Path) -> None:
    """Register a COCO panoptic file under ``name``; repeating the call with the same arguments has no effect.

    Things and stuff share one list of classes: class k is the k-th category by ascending id. ``thing_classes`` and
    ``stuff_classes`` both list all of them, as in detectron2's "standard" panoptic metadata.

    Args:
        name: for ``DATASETS.TRAIN`` and ``DATASETS.TEST``.
        images: folder of the image files, of any format.
        annotations: COCO panoptic JSON.
        panoptic: folder of its PNG files.

    Raises:
        InputError: a path is missing, the file is not COCO panoptic, its images and maps do not match, or the name
            is taken by another data set.
    """
    folder, path, maps = _absolute(images), _absolute(annotations), _absolute(panoptic)
    content = _read(folder, path)
    if content.maps is None:
        raise InputError(f"{path} is a COCO detection file: register it with register_coco")
    check_maps(content, maps, masks=True)
    _check_pairs(content, content.maps, maps)
    class_map = content.class_map
    names = list(class_map.distinct_names)
    things, stuff = (
        {category_id: index for category_id, index in class_map.index.items() if class_map.is_thing[index] == wanted}
        for wanted in (True, False)
    )
    metadata = {
        "evaluator_type": "coco_panoptic_seg",
        "ignore_label": IGNORE_LABEL,
        "image_root": str(folder),
        "label_divisor": LABEL_DIVISOR,
        "panoptic_json": str(path),
        "panoptic_root": str(maps),
        "stuff_classes": names,
        "stuff_dataset_id_to_contiguous_id": stuff,
        "thing_classes": names,
        "thing_dataset_id_to_contiguous_id": things,
    }
    _register(name, partial(_panoptic_records, folder, path, maps), metadata)


def panoptic_classes(name: str) -> ClassMap:
    """Return the classes of a registered panoptic data set; class k is the contiguous id k of the metadata.

    Raises:
        InputError: things and stuff do not share one list of classes, or the annotation file lacks some of them.
    """
    metadata = MetadataCatalog.get(name)
    things, stuff = metadata.thing_dataset_id_to_contiguous_id, metadata.stuff_dataset_id_to_contiguous_id
    pairs = sorted((index, category_id) for ids in (things, stuff) for category_id, index in ids.items())
    if [index for index, _ in pairs] != list(range(len(pairs))):
        raise InputError(
            f"data set '{name}' numbers things {sorted(things.values())} and stuff {sorted(stuff.values())}, expected "
            f"every number from 0 to {len(pairs) - 1} once: register it with register_coco_panoptic"
        )
    category_ids = tuple(category_id for _, category_id in pairs)
    listed = read_annotations(Path(metadata.panoptic_json)).class_map
    if unknown := sorted(set(category_ids) - set(listed.category_ids)):
        raise InputError(
            f"data set '{name}' has categories {unknown}, which its file {metadata.panoptic_json} does not list"
        )
    names = tuple(listed.names[listed.index[category_id]] for category_id in category_ids)
    return ClassMap(category_ids, names, tuple(category_id in things for category_id in category_ids))


def _register(name: str, load: Callable[[], Records], metadata: Mapping[str, Any]) -> None:
    known = MetadataCatalog.get(name).as_dict()
    compared = metadata.keys() if name in DatasetCatalog else metadata.keys() & known.keys()
    for key in sorted(compared):
        if known.get(key) != metadata[key]:
            raise InputError(
                f"the name '{name}' is taken: its {key} is {known.get(key)}, this data set's is {metadata[key]}; take "
                "another name, or remove that one from DatasetCatalog and MetadataCatalog first"
            )
    if name not in DatasetCatalog:
        DatasetCatalog.register(name, load)
        MetadataCatalog.get(name).set(**metadata)


def _detection_records(folder: Path, path: Path, index: Mapping[int, int]) -> Records:
    """Return detectron2's records with class indices instead of category ids."""
    records: Records = load_coco_json(str(path), str(folder))
    for record in records:
        for annotation in record["annotations"]:
            annotation["category_id"] = index[annotation["category_id"]]
    return records


def _panoptic_records(folder: Path, path: Path, maps: Path) -> Records:
    """Return one record per image, ``segments_info`` with class indices instead of category ids."""
    content = read_annotations(path)
    class_map = content.class_map
    segments = defaultdict(list)
    for segment in content.annotations:
        index = class_map.index[segment["category_id"]]
        kept = {key: segment[key] for key in _OF_SEGMENTS if key in segment}
        segments[segment["image_id"]].append({**kept, "category_id": index, "isthing": class_map.is_thing[index]})
    pngs = dict(content.maps or ())
    return [
        {
            "file_name": str(folder / image["file_name"]),
            "image_id": image["id"],
            **_sides(image),
            "pan_seg_file_name": str(maps / pngs[image["id"]]),
            "segments_info": segments[image["id"]],
        }
        for image in sorted(content.images, key=lambda image: image["id"])
    ]


def _sides(image: Mapping[str, Any]) -> dict[str, int]:
    size = annotated_size(image)
    return {} if size is None else {"height": size[0], "width": size[1]}


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _read(folder: Path, path: Path) -> CocoAnnotations:
    """Read the annotations; check that the first image exists and that objects have boxes and listed categories."""
    check_folder(folder)
    content = read_annotations(path)
    first = folder / content.images[0]["file_name"]
    if not first.is_file():
        raise InputError(f"{path} lists the image {first}, which does not exist: give its parent folder")
    if unknown := {one["category_id"] for one in content.annotations}.difference(content.class_map.category_ids):
        raise InputError(f"{path} has objects of categories {sorted(unknown)}, which it does not list")
    for one in content.annotations:
        try:
            annotation_values(one)
        except ValueError as error:
            raise InputError(
                f"{path}: image {one['image_id']} has {error}; run tools/check_data.py for a list of all problems"
            ) from None
    return content


def _check_for_detectron2(content: CocoAnnotations) -> None:
    """Raise on values that detectron2's reader cannot handle; warn of those that its evaluator cannot."""
    for image in content.images:
        if annotated_size(image) is None:
            raise InputError(f"{content.path}: image {image['id']} has no height and width; detectron2 needs them")
    ids = [annotation.get("id") for annotation in content.annotations]
    if not all(map(is_id, ids)) or len(set(ids)) < len(ids):
        raise InputError(f"{content.path}: detectron2 needs a unique id for every annotation")
    lacking = [key for key in ("area", "iscrowd") if any(key not in one for one in content.annotations)]
    if lacking or 0 in ids:
        logger.warning(
            "%s can be used for training, but not for detectron2's evaluation: %s",
            content.path,
            f"annotations lack {', '.join(lacking)}" if lacking else "annotation id 0 counts as no match",
        )


def _check_pairs(content: CocoAnnotations, files: Sequence[MapFile], maps: Path) -> None:
    """Raise unless images and maps match one to one and the first map exists."""
    mapped = {file.image_id for file in files}
    image_ids = {image["id"] for image in content.images}
    if len(mapped) < len(files) or mapped != image_ids:
        raise InputError(
            f"{content.path} has {len(image_ids)} images and {len(files)} annotations, expected one for each image; "
            f"without annotation: [{listed(sorted(image_ids - mapped))}], not in images: "
            f"[{listed(sorted(mapped - image_ids))}]"
        )
    first = maps / files[0].file_name
    if not first.is_file():
        raise InputError(f"{content.path} lists the map {first}, which does not exist: give the folder of the PNGs")
