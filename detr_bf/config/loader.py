"""YAML files that inherit, ``key=value`` overrides, and messages that name the mistake.

A file may start with ``base: other.yaml`` (or a list of files, later ones win), relative to itself; it then states only
its difference. Values may use omegaconf's interpolations, such as ``${oc.env:HOME}``.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from detr_bf.config.classifier import ClassifierConfig, MaskedConfig
from detr_bf.config.run import RunConfig
from detr_bf.config.schema import Config
from detr_bf.errors import InputError

_RENAMED = {"train.checkpoint_every": "checkpoint.every_steps", "train.keep_every": "checkpoint.keep_every"}
_TOOLS = {  # by the task of a config: its schema, and the command that trains it
    "detection": (Config, "tools/train_net.py"),
    "classification": (ClassifierConfig, "tools/train_classifier.py"),
    "masked_autoencoding": (MaskedConfig, "tools/pretrain_mae.py"),
}

C = TypeVar("C", bound=RunConfig)


@overload
def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config: ...
@overload
def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, schema: type[C]) -> C: ...
def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, schema: type[Any] = Config) -> Any:
    """The defaults, then ``path`` and the files it inherits from, then the overrides, checked and typed.

    Raises:
        InputError: a file is missing or is not YAML, a key is unknown, a value has the wrong type or is out of range,
            or the file is of another task than the ``schema``.
    """
    merged = OmegaConf.structured(schema)
    sources = list(_inherited(Path(path), ())) if path is not None else []
    sources += [(f"override '{override}'", _parse_override(override)) for override in overrides]
    for source, tree in sources:
        _check_task(tree, schema, source)
        merged = _merge(merged, tree, source, schema)
    return _finish(merged, str(path))


def config_from_dict(tree: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "the saved config") -> Any:
    """Inverse of :func:`config_to_dict`, of the task's type; reads older names. Messages name the ``source``.

    Raises:
        InputError: settings it does not know, or as :func:`load_config` for the overrides.
    """
    return _from_tree(OmegaConf.create(tree), source, overrides)


def _from_tree(saved: DictConfig, source: str, overrides: Sequence[str]) -> Any:
    schema = _schema_of(saved, source)
    for old, new in _RENAMED.items():
        group, _, name = old.rpartition(".")
        if name in OmegaConf.select(saved, group, default={}):
            OmegaConf.update(saved, new, saved[group].pop(name), force_add=True)
    merged = _merge(OmegaConf.structured(schema), saved, source, schema)
    for override in overrides:
        merged = _merge(merged, _parse_override(override), f"override '{override}'", schema)
    return _finish(merged, source)


def saved_config(path: Path) -> Any:
    """The ``config.yaml`` of a run, or another file with the task in it, of its task's type; reads older names.

    Raises:
        InputError: as :func:`load_config`.
    """
    tree = OmegaConf.merge(*(tree for _, tree in _inherited(path, ())))
    return _from_tree(typing.cast(DictConfig, tree), f"file {path}", ())


def _schema_of(tree: DictConfig, source: str) -> type[Any]:
    task = tree.get("task", "detection")  # earlier versions knew no other
    if task not in _TOOLS:
        raise InputError(f"{source}: task must be one of {', '.join(_TOOLS)}; got '{task}'")
    return _TOOLS[task][0]


def _check_task(tree: DictConfig, schema: type[Any], source: str) -> None:
    """A config of another task has other settings: say so before they are found unknown."""
    if "task" in tree and _schema_of(tree, source) is not schema:
        raise InputError(f"{source} is of the task {tree.task}: use {_TOOLS[tree.task][1]}")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, for checkpoints."""
    return dataclasses.asdict(config)


def config_to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def known_keys(schema: type[Any] = Config, prefix: str = "") -> Iterator[str]:
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


def _merge(merged: DictConfig, tree: DictConfig, source: str, schema: type[Any]) -> DictConfig:
    _check_groups(merged, tree, source)
    try:
        return typing.cast(DictConfig, OmegaConf.merge(merged, tree))
    except ConfigKeyError as error:
        raise InputError(_unknown_key(str(error.full_key), source, schema)) from error
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        value = OmegaConf.select(tree, key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        raise InputError(
            f"{source}: {key} must be {_expected_type(key, schema)}, got {value!r} of type {type(value).__name__}"
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


def _unknown_key(key: str, source: str, schema: type[Any]) -> str:
    if key in _RENAMED:
        return f"{source}: '{key}' is now called '{_RENAMED[key]}'"
    keys = list(known_keys(schema))
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


def _expected_type(key: str, schema: type[Any]) -> str:
    """The schema's type of a full key, in words."""
    hint: Any = schema
    for part in key.split("."):
        name, _, index = part.partition("[")
        hint = typing.get_type_hints(hint)[name]
        if index:
            hint = typing.get_args(hint)[0]
    return (
        hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("NoneType", "null")
    )


def _finish(merged: DictConfig, source: str) -> Any:
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InputError(f"config {source}: {error}") from error
    _check_values(config)
    return config


def _check_values(group: Any, prefix: str = "") -> None:
    """Compare every value with what its field allows, and let groups of settings check what belongs together."""
    for field in dataclasses.fields(group):
        value, key = getattr(group, field.name), prefix + field.name
        choices, rule = field.metadata.get("choices"), field.metadata.get("rule")
        if dataclasses.is_dataclass(value):
            _check_values(value, f"{key}.")
        if choices and value not in choices:
            raise InputError(f"{key} must be one of {', '.join(choices)}; got '{value}'")
        if rule and value is not None and not rule.holds(value):
            raise InputError(f"{key} must be {rule.wanted}, got {value}")
    if hasattr(group, "check_values"):
        group.check_values(prefix)
