"""YAML files that inherit, ``key=value`` overrides, and messages that name the mistake.

A file may start with ``base: other.yaml`` (or a list of files, later ones win), relative to itself; it then states only
its difference. Values may use omegaconf's interpolations, such as ``${oc.env:HOME}``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from detr_bf.config.schema import Config
from detr_bf.errors import InputError

_RENAMED = {"train.checkpoint_every": "checkpoint.every_steps", "train.keep_every": "checkpoint.keep_every"}


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The defaults, then ``path`` and the files it inherits from, then the overrides, checked and typed.

    Raises:
        InputError: a file is missing or is not YAML, a key is unknown, a value has the wrong type or is out of range.
    """
    merged = OmegaConf.structured(Config)
    sources = list(_inherited(Path(path), ())) if path is not None else []
    sources += [(f"override '{override}'", _parse_override(override)) for override in overrides]
    for source, tree in sources:
        merged = _merge(merged, tree, source)
    return _finish(merged, str(path))


def config_from_dict(tree: dict[str, Any]) -> Config:
    """Inverse of :func:`config_to_dict`; reads older names, and settings it does not know are an InputError."""
    saved = OmegaConf.create(tree)
    for old, new in _RENAMED.items():
        group, _, name = old.rpartition(".")
        if name in OmegaConf.select(saved, group, default={}):
            OmegaConf.update(saved, new, saved[group].pop(name), force_add=True)
    return _finish(_merge(OmegaConf.structured(Config), saved, "the saved config"), "the saved config")


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, for checkpoints."""
    return dataclasses.asdict(config)


def config_to_yaml(config: Config) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def known_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every full key of the schema, ``train.epochs`` for instance."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from known_keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _inherited(path: Path, chain: tuple[Path, ...]) -> Iterator[tuple[str, DictConfig]]:
    """The files ``path`` inherits from, most basic first, then ``path`` itself."""
    if path.resolve() in chain:
        raise InputError(f"config files inherit in a circle: {' -> '.join(map(str, (*chain, path)))}")
    tree = _read_yaml(path)
    named = tree.pop("base", [])
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, (list, ListConfig)) or not all(isinstance(base, str) for base in bases):
        raise InputError(f"config file {path}: base must name a file or a list of files, got {bases!r}")
    for base in bases:
        yield from _inherited(path.parent / base, (*chain, path.resolve()))
    yield f"file {path}", tree


def _read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        raise InputError(f"config file not found: {path}. Give an existing YAML file, configs/demo.yaml for instance.")
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise InputError(f"config file {path} is not valid YAML: {error}") from error
    if not isinstance(tree, DictConfig):
        raise InputError(f"config file {path} must hold 'key: value' lines, got a list")
    return tree


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"override '{override}' is not of the form key=value, train.epochs=12 for instance")
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"override '{override}' cannot be read: {error}") from error


def _merge(merged: DictConfig, tree: DictConfig, source: str) -> DictConfig:
    _check_groups(merged, tree, source)
    try:
        return typing.cast(DictConfig, OmegaConf.merge(merged, tree))
    except ConfigKeyError as error:
        raise InputError(_unknown_key(str(error.full_key), source)) from error
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        value = OmegaConf.select(tree, key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        raise InputError(
            f"{source}: {key} must be {_expected_type(key)}, got {value!r} of type {type(value).__name__}"
        ) from error


def _check_groups(merged: DictConfig, tree: DictConfig, source: str, prefix: str = "") -> None:
    """Where the schema has a group of settings, the tree must have one too: omegaconf's own message names no key."""
    for key in map(str, tree):
        known = merged.get(key) if key in merged else None
        if not isinstance(known, DictConfig):
            continue
        given = tree._get_node(key)
        if not isinstance(given, DictConfig) or given._is_none():
            settings = ", ".join(map(str, known))
            raise InputError(f"{source}: {prefix}{key} is a group of settings ({settings}), not a value")
        _check_groups(known, given, source, f"{prefix}{key}.")


def _unknown_key(key: str, source: str) -> str:
    if key in _RENAMED:
        return f"{source}: '{key}' is now called '{_RENAMED[key]}'"
    keys = list(known_keys())
    leaf = key.rpartition(".")[2]
    near = [known for known in keys if known.rpartition(".")[2] == leaf]
    groups = dict.fromkeys(known.rpartition(".")[0] for known in keys if "." in known)
    near += [known for known in difflib.get_close_matches(key, [*keys, *groups], cutoff=0.6) if known not in near]
    prefix = key[: len(key) - len(leaf)]
    siblings = dict.fromkeys(known[len(prefix) :].split(".")[0] for known in keys if known.startswith(prefix))
    message = f"{source}: unknown key '{key}'."
    if near:
        message += f" Nearest known keys: {', '.join(near)}."
    return message + f" Known in {prefix.rstrip('.') or 'the config'}: {', '.join(siblings)}."


def _expected_type(key: str) -> str:
    """The schema's type of a full key, in words."""
    hint: Any = Config
    for part in key.split("."):
        name, _, index = part.partition("[")
        hint = typing.get_type_hints(hint)[name]
        if index:
            hint = typing.get_args(hint)[0]
    return (
        hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("NoneType", "null")
    )


def _finish(merged: DictConfig, source: str) -> Config:
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InputError(f"config {source}: {error}") from error
    assert isinstance(config, Config)
    _check_choices(config)
    _check_ranges(config)
    _check_lists(config)
    return config


def _check_choices(group: Any, prefix: str = "") -> None:
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            _check_choices(value, f"{prefix}{field.name}.")
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise InputError(f"{prefix}{field.name} must be one of {', '.join(choices)}; got '{value}'")


_POSITIVE = (
    "optimizer.drop_factor",
    "model.hidden_dim",
    "model.heads",
    "model.decoder_layers",
    "model.feedforward_dim",
    "model.num_queries",
    "model.position_temperature",
    "model.deformable.encoder_points",
    "model.deformable.decoder_points",
    "model.smca.smooth",
    "model.smca.stride",
    "batch_former.num_layers",
    "batch_former.heads",
    "train.epochs",
    "train.max_steps",
    "train.batch_size",
    "train.accumulate",
    "train.log_every",
    "train.timeout_minutes",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "train.eval_every",
    "eval.batch_size",
    "eval.max_detections",
    "data.transforms.max_size",
    "data.transforms.eval_short_side",
    "data.transforms.crop_min",
    "data.transforms.crop_max",
    "data.aspect_buckets",
)
_NOT_NEGATIVE = (
    "model.encoder_layers",
    "model.extra_levels",
    "model.backbone.frozen_stages",
    "optimizer.lr",
    "optimizer.backbone_lr",
    "optimizer.point_lr_factor",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "optimizer.clip_norm",
    "batch_former.lr_factor",
    "batch_former.weight_decay",
    "train.max_skipped",
    "checkpoint.keep_every",
    "eval.pictures",
    "data.workers",
    "loss.no_object_weight",
)
_SIZES = ("data.transforms.short_sides", "data.transforms.crop_short_sides", "model.backbone.strides")
_FRACTIONS = (
    "model.dropout",
    "batch_former.dropout",
    "data.max_unreadable",
    "data.transforms.horizontal_flip",
    "data.transforms.random_crop",
    "train.ema.decay",
    "eval.picture_threshold",
)


def _check_ranges(config: Config) -> None:
    for keys, holds, wanted in (
        (_POSITIVE, lambda value: 0 < value < math.inf, "greater than 0 and finite"),
        (_NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "0 or more and finite"),
        (("seed",), lambda value: 0 <= value < 2**63, "at least 0 and less than 2**63"),
        (_FRACTIONS, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ):
        for key in keys:
            value = _get(config, key)
            if value is not None and not holds(value):
                raise InputError(f"{key} must be {wanted}, got {value}")


def _check_lists(config: Config) -> None:
    """Lists of sizes hold something, all of it positive."""
    for key in _SIZES:
        sizes = _get(config, key)
        if not sizes or min(sizes) < 1:
            raise InputError(f"{key} must list one or more sizes greater than 0, got {list(sizes)}")
    transforms = config.data.transforms
    if transforms.crop_min > transforms.crop_max:
        raise InputError(
            f"data.transforms.crop_min={transforms.crop_min} must not exceed "
            f"data.transforms.crop_max={transforms.crop_max}"
        )


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
