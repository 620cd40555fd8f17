"""Roboflow's COCO export: a folder with images and ``_annotations.coco.json`` for each split.

The files of the splits number their images and categories independently; here both are numbered over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import annotated_size
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats.folder import AnnotatedImage, DataFolder, coco_content
from detr_bf.data.paths import PathIndex, leads_out

ANNOTATION_FILE = "_annotations.coco.json"


def read_roboflow(root: Path, names: Sequence[str]) -> DataFolder:
    """Read the COCO files of all splits; the split of a file is the name of its folder.

    Categories are told apart by their names. Supercategories without objects are left out, as
    :attr:`~detr_bf.data.coco.CocoAnnotations.parents` says.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: a file is not a COCO detection file, or names an image outside its folder.
    """
    files = [name for name in names if PurePosixPath(name).name == ANNOTATION_FILE]
    if not files:
        raise InputError(
            f"{printable(root)} has no {ANNOTATION_FILE}, which Roboflow's COCO export has in the folder of each split"
        )
    images: list[AnnotatedImage] = []
    index = PathIndex(names)
    categories: dict[str, dict[str, Any]] = {}
    for name in files:
        content = read_annotations(root / name)
        if content.maps is not None:
            raise InputError(f"{printable(content.path)} is a COCO panoptic file, expected a detection file")
        classes = {category["id"]: _name(content, category) for category in content.categories}
        for category in content.categories:
            categories.setdefault(classes[category["id"]], {**category, "id": len(categories)})
        images += _images(content, str(PurePosixPath(name).parent), classes, index)
    numbers = {name: category["id"] for name, category in categories.items()}
    used = [{"category_id": numbers[one["name"]]} for image in images for one in image.objects]
    parents = {category["name"] for category in CocoAnnotations(root, [], used, [*categories.values()]).parents}
    return DataFolder(root, coco_content(root, images, set(categories) - parents), {})


def _images(
    content: CocoAnnotations, folder: str, classes: dict[int, str], index: PathIndex
) -> Iterator[AnnotatedImage]:
    where = printable(content.path)
    objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in content.images}
    if len(objects) < len(content.images) or len({i["file_name"] for i in content.images}) < len(content.images):
        raise InputError(f"{where} lists an image id or a file twice")
    for number, one in enumerate(content.annotations):
        if one["image_id"] not in objects or one["category_id"] not in classes:
            raise InputError(
                f"{where}: annotations[{number}] names image {one['image_id']} and category {one['category_id']}, and "
                "one of them is not listed"
            )
        values = {key: value for key, value in one.items() if key not in ("id", "image_id", "category_id")}
        objects[one["image_id"]].append({**values, "name": classes[one["category_id"]]})
    for image in content.images:
        name = image["file_name"]
        if leads_out(name):
            raise InputError(f"{where}: {printable(name)} leads out of the folder of the file")
        path = index.find(name, [folder]) or str(PurePosixPath(folder, name))
        yield AnnotatedImage(path, annotated_size(image), objects[image["id"]])


def _name(content: CocoAnnotations, category: Any) -> str:
    name = category.get("name")
    if name is None or not str(name).strip():
        raise InputError(f"{printable(content.path)}: category {category['id']} has no name")
    return str(name)
