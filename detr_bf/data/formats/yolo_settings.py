"""Class names and splits of a YOLO folder: ``data.yaml`` of Ultralytics, ``obj.data`` of Darknet, or a list of names.

Without ``data.yaml`` the one YAML file of the folder with ``names`` and ``train`` or ``val`` is taken
(``coco128.yaml``). Paths of these files are often those of another machine: they are searched inside the folder alone
(:class:`~detr_bf.data.paths.PathIndex`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_regular
from detr_bf.common.text import listed, printable
from detr_bf.data.annotation_values import is_id, value_text
from detr_bf.data.formats.folder import is_image, read_lines
from detr_bf.data.paths import LEADING_OUT, PathIndex, leads_out

SETTINGS = ("data.yaml", "data.yml")
CLASS_LIST = "classes.txt"
_DARKNET_LISTS = "_darknet.labels"  # of Roboflow's Darknet export
_SPLITS = ("train", "val", "valid", "test")  # keys of the settings
_MAX_BYTES = 2**20


class YoloSettings(NamedTuple):
    """Settings of a YOLO folder."""

    classes: list[str]
    splits: dict[str, list[str]]  # folders, lists of images and images of each split; an empty path is the root
    keypoints: tuple[int, int] | None = None  # number and values of each; None for labels without keypoints


def is_class_list(name: str) -> bool:
    """Return True for a file with the name of a class in each line."""
    path = PurePosixPath(name)
    return path.name in (CLASS_LIST, _DARKNET_LISTS) or path.suffix == ".names"


def is_yolo(root: Path, names: Sequence[str]) -> bool:
    """Return True for a folder with class names or splits in a form that only YOLO has, though not in data.yaml."""
    return any(map(is_class_list, names)) or bool(_yaml_files(root, names))


def read_settings(root: Path, names: Sequence[str]) -> YoloSettings:
    """Read the settings of a folder.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: there are none, several that contradict each other, or they are not usable.
    """
    own = next((name for name in SETTINGS if name in names), None)
    found = {own: _read_yaml(root / own)} if own else _yaml_files(root, names)
    if len(found) > 1:
        raise InputError(
            f"{printable(root)} has several YAML files with class names and splits: {listed(found)}. Rename the one "
            f"that describes the data to {SETTINGS[0]}"
        )
    for name, content in found.items():
        return _yaml_settings(root, names, root / name, content)
    darknet = {
        name: content for name in names if name.endswith(".data") and "names" in (content := _pairs(root / name))
    }
    if len(darknet) > 1:
        raise InputError(f"{printable(root)} has several files of Darknet: {listed(darknet)}. Keep one of them")
    for name, content in darknet.items():
        return _darknet_settings(root, names, name, content)
    lists = [name for name in names if is_class_list(name)]
    if not lists:
        raise InputError(
            f"{printable(root)} has YOLO labels without class names: expected {SETTINGS[0]} with names, or a file "
            f"{CLASS_LIST} (obj.names) with one name in each line"
        )
    first, *others = ([line for _, line in read_lines(root / name)] for name in lists)
    if any(other != first for other in others):
        raise InputError(f"{printable(root)}: its files {CLASS_LIST} differ: {listed(lists)}")
    return YoloSettings(_checked_classes(root / lists[0], first), {})


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{printable(path)} is not YAML: {printable(' '.join(str(error).split()))}") from error
    if not isinstance(content, dict):
        raise InputError(f"{printable(path)} must contain 'key: value' lines")
    return content


def _yaml_files(root: Path, names: Sequence[str]) -> dict[str, dict[Any, Any]]:
    """Return the content of the YAML files that have class names and splits; other YAML files may be anything."""
    found = {}
    for name in names:
        if "/" not in name and name.lower().endswith((".yaml", ".yml")):
            try:
                content = _read_yaml(root / name)
            except InputError:
                continue
            if "names" in content and ("train" in content or "val" in content):
                found[name] = content
    return found


def _yaml_settings(root: Path, names: Sequence[str], path: Path, content: Mapping[Any, Any]) -> YoloSettings:
    classes = content.get("names")
    if isinstance(classes, dict) and set(classes) == set(range(len(classes))):
        classes = [classes[number] for number in range(len(classes))]
    if not isinstance(classes, list):
        raise InputError(f"{printable(path)}: names is {value_text(classes)}, expected the class names from class 0 on")
    given: dict[str, list[str]] = {}
    for key in _SPLITS:
        value = content.get(key) or []
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str) for entry in entries):
            raise InputError(f"{printable(path)}: {key} is {value_text(value)}, expected a path or a list of paths")
        if entries:
            given[key] = entries
    base = content.get("path") or ""
    if not isinstance(base, str):
        raise InputError(f"{printable(path)}: path is {value_text(base)}, expected the path of a folder")
    keypoints = content.get("kpt_shape")
    if keypoints is not None and not (
        isinstance(keypoints, list) and len(keypoints) == 2 and is_id(keypoints[0], 1) and keypoints[1] in (2, 3)
    ):
        raise InputError(
            f"{printable(path)}: kpt_shape is {value_text(keypoints)}, expected the number of keypoints, and 2 or 3 "
            "values for each, such as [17, 3]"
        )
    splits = _inside(root, names, path, given, base)
    return YoloSettings(_checked_classes(path, classes), splits, (keypoints[0], keypoints[1]) if keypoints else None)


def _pairs(path: Path) -> dict[str, str]:
    """Return the ``key = value`` lines of a file of Darknet; none of a file of another form."""
    try:
        lines = read_regular(path, _MAX_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _darknet_settings(root: Path, names: Sequence[str], name: str, content: Mapping[str, str]) -> YoloSettings:
    path, folders = root / name, [str(PurePosixPath(name).parent), ""]
    (classes,) = PathIndex(names).find_all([content["names"]], folders)
    if classes is None:
        raise InputError(f"{printable(path)}: names is {printable(content['names'])}, no file of {printable(root)}")
    given = {key: [content[key]] for key in _SPLITS if content.get(key)}
    lines = [line for _, line in read_lines(root / classes)]
    return YoloSettings(_checked_classes(root / classes, lines), _inside(root, names, path, given, folders[0]))


def _checked_classes(path: Path, classes: Sequence[Any]) -> list[str]:
    """Return the names as text; each must be given once, because classes are told apart by their names."""
    named = [
        str(name).strip() for name in classes if isinstance(name, (str, int, float)) and not isinstance(name, bool)
    ]
    if not named or not all(named) or len(set(named)) < len(classes):
        raise InputError(
            f"{printable(path)}: the class names are {printable(value_text(list(classes)))}; expected text, each name "
            "once (in quotes where YAML reads yes, no, on or off)"
        )
    return named


def _inside(
    root: Path, names: Sequence[str], path: Path, given: Mapping[str, Sequence[str]], base: str
) -> dict[str, list[str]]:
    """Return the paths of the splits, given below ``base`` or the root, relative to the root.

    One inside the root that does not exist is returned as it is.

    Raises:
        InputError: a path leads out of the root, and no end of it is in the root.
    """
    below = {str(parent) for name in names for parent in PurePosixPath(name).parents}  # includes "."
    index, base = PathIndex([*names, *below]), _from_root(root, base)
    entries = [_from_root(root, entry) for each in given.values() for entry in each]
    found = [index.find(entry, [base, ""]) for entry in entries]
    if not any(found):
        try:
            found = index.find_all([posixpath.join(base, entry) for entry in entries])
        except InputError as error:
            raise InputError(f"{printable(path)}: {error}") from error
    following = iter(found)
    return {
        key: [_checked(root, f"{printable(path)}: {key}", entry, next(following)) for entry in each]
        for key, each in given.items()
    }


def _from_root(root: Path, text: str) -> str:
    """Return an absolute path inside the root relative to it, and any other as it is."""
    path = PurePosixPath(text.replace("\\", "/"))
    for base in (root.absolute(), root.resolve()):
        if path.is_relative_to(base.as_posix()):
            return path.relative_to(base.as_posix()).as_posix()
    return text


def _checked(root: Path, where: str, text: str, found: str | None) -> str:
    inside = LEADING_OUT.sub("", _from_root(root, text).replace("\\", "/"))
    if found is None and leads_out(inside):
        raise InputError(
            f"{where} is {printable(text)}, which leads out of {printable(root)}, and no end of it is inside: give a "
            "path inside it, or remove the line"
        )
    path = inside if found is None else found
    return "" if path == "." else path


def images_of_list(root: Path, names: Sequence[str], name: str) -> set[str]:
    """Return the images that a list names, one in each line, relative to the root or to the folder of the list.

    Raises:
        InputError: an image is not found; the message has the number of these lines.
    """
    lines = read_lines(root / name)
    index = PathIndex([*filter(is_image, names)])
    texts = [_from_root(root, line) for _, line in lines]
    try:
        found = index.find_all(texts, ["", str(PurePosixPath(name).parent)])
    except InputError as error:
        raise InputError(f"{printable(root / name)}: {error}") from error
    lost = [f"{number} is {printable(line)}" for (number, line), each in zip(lines, found, strict=True) if each is None]
    if lost:
        raise InputError(
            f"{printable(root / name)}:{lost[0]}, which is no image of {printable(root)}; so are {len(lost)} of "
            f"{len(lines)} lines: correct or remove them, or add the images"
        )
    return {each for each in found if each is not None}
