"""YAML files that inherit, ``key=value`` overrides, and messages that name the mistake.

A file may start with ``base: other.yaml`` (or a list of files, later ones win), relative to itself; it then states only
its difference. Values that the user gives may use omegaconf's interpolations, such as ``${oc.env:HOME}``. What a run
has stored is plain data: there ``${...}`` is text like any other, as a checkpoint may come from somebody else.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from detr_bf.config.classification import ClassifierConfig, MaskedConfig
from detr_bf.config.detection import DetectionConfig
from detr_bf.config.fields import Rule
from detr_bf.config.run import RunConfig
from detr_bf.errors import InputError, prefix_errors
from detr_bf.text import printable

_RENAMED = {"train.checkpoint_every": "checkpoint.every_steps", "train.keep_every": "checkpoint.keep_every"}
_TOOLS = {  # by the task of a config: its schema, and the command that trains it
    "detection": (DetectionConfig, "tools/train_net.py"),
    "classification": (ClassifierConfig, "tools/train_classifier.py"),
    "masked_autoencoding": (MaskedConfig, "tools/pretrain_mae.py"),
}
_LONGEST = 2**18  # bytes of a config file
_NODES = 100_000  # values of a config file after its aliases are replaced by what they stand for
_DEEPEST = 100  # levels of settings
_FILES = 100  # that a config inherits from
# Raised by omegaconf and PyYAML, and by Python for numbers of thousands of digits and for deep nesting.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError, RecursionError, TypeError)

C = TypeVar("C", bound=RunConfig)


@overload
def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> DetectionConfig: ...
@overload
def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, schema: type[C]) -> C: ...
def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, schema: type[Any] = DetectionConfig) -> Any:
    """The defaults, then ``path`` and the files it inherits from, then the overrides, checked and typed.

    Raises:
        InputError: a file is missing or is not YAML, a key is unknown, a value has the wrong type or is out of range,
            or the file is of another task than the ``schema``.
    """
    merged = OmegaConf.structured(schema)
    sources = list(_inherited(Path(path), ())) if path is not None else []
    sources += [(f"override '{printable(override)}'", _parse_override(override)) for override in overrides]
    for source, tree in sources:
        if "task" in tree and _schema_of(tree, source) is not schema:  # it has other settings, which would be unknown
            raise InputError(f"{source} is of the task {tree['task']}: use {_TOOLS[tree['task']][1]}")
        merged = _merge(merged, tree, source, schema)
    try:
        config = OmegaConf.to_object(merged)
    except _UNREADABLE as error:
        key = getattr(error, "full_key", None)
        where = f"config {printable(path)}:{f' {printable(key)}:' if key else ''}"
        raise InputError(f"{where} {_first_line(error)}") from error
    _check_values(config)
    return config


def config_from_dict(tree: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "the saved config") -> Any:
    """Inverse of :func:`config_to_dict`, of the task's type; reads older names. Messages name the ``source``.

    The tree is plain data, in which nothing is interpolated; the overrides are the user's own.

    Raises:
        InputError: settings it does not know, or as :func:`load_config` for the overrides.
    """
    schema = _schema_of(tree, source)
    saved = _with_new_names(_escaped(tree, source))
    merged = _merge(OmegaConf.structured(schema), saved, source, schema)
    for override in overrides:
        merged = _merge(merged, _parse_override(override), f"override '{printable(override)}'", schema)
    try:
        config = OmegaConf.to_object(merged)
    except _UNREADABLE as error:  # text in the place of a number, or an override that cannot be resolved
        key = str(getattr(error, "full_key", None) or "")
        raise InputError(_wrong_type(source, key, _given(tree, key), schema)) from error
    with prefix_errors(source):
        _check_values(config)
    return config


def saved_config(path: Path) -> Any:
    """The ``config.yaml`` of a run, of its task's type; reads older names. It is plain data, as a checkpoint's.

    Raises:
        InputError: as :func:`load_config`.
    """
    return config_from_dict(_unescaped(_read_yaml(path)), source=f"file {printable(path)}")


def schema_of(path: Path) -> type[Any]:
    """Return the schema of the task that a config file, or one that it inherits from, is of.

    Raises:
        InputError: a file is missing, is no YAML, or there is no such task.
    """
    tree: dict[str, Any] = {}
    for _, inherited in _inherited(path, ()):
        tree |= inherited
    return _schema_of(tree, f"file {printable(path)}")


def _with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Move settings of older versions to where they are now."""
    for old, new in _RENAMED.items():
        (old_group, old_name), (new_group, new_name) = old.split("."), new.split(".")
        source, target = tree.get(old_group), tree.get(new_group, {})
        if isinstance(source, dict) and isinstance(target, dict) and old_name in source:
            tree = {**tree, new_group: {**target, new_name: source.pop(old_name)}}
    return tree


def _escaped(tree: Any, source: str, depth: int = 0) -> Any:
    """Return plain data in which omegaconf finds no interpolation: what looks like one stands for itself."""
    if depth > _DEEPEST:
        raise InputError(f"{source}: its settings are nested too deeply, more than {_DEEPEST} levels")
    if isinstance(tree, dict):
        return {key: _escaped(value, source, depth + 1) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_escaped(value, source, depth + 1) for value in tree]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", tree) if isinstance(tree, str) else tree


def _unescaped(tree: Any) -> Any:
    """Inverse of :func:`_escaped`."""
    if isinstance(tree, dict):
        return {key: _unescaped(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_unescaped(value) for value in tree]
    return re.sub(r"(\\*)\$\{", lambda m: f"{m[1][: len(m[1]) // 2]}${{", tree) if isinstance(tree, str) else tree


def _schema_of(tree: Any, source: str) -> type[Any]:
    if not isinstance(tree, dict):
        raise InputError(f"{source}: expected a dictionary of settings, got {printable(repr(tree))}")
    task = tree.get("task", "detection")  # earlier versions knew no other
    if not isinstance(task, str) or task not in _TOOLS:
        raise InputError(f"{source}: task must be one of {', '.join(_TOOLS)}; got '{printable(task)}'")
    return _TOOLS[task][0]


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, for checkpoints."""
    return dataclasses.asdict(config)


def config_to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config_to_dict(config), "the config")))


def known_keys(schema: type[Any] = DetectionConfig, prefix: str = "") -> Iterator[str]:
    """Every full key of the schema, ``train.epochs`` for instance."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from known_keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _inherited(path: Path, chain: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files ``path`` inherits from, most basic first, then ``path`` itself."""
    shown, tree = printable(path), _read_yaml(path)
    if path.resolve() in chain:
        raise InputError(f"config files inherit in a circle: {' -> '.join(map(printable, (*chain, path)))}")
    named = _own_value(tree.pop("base", []), f"config file {shown}: base")
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise InputError(f"config file {shown}: base must name a file or a list of files, got {printable(repr(bases))}")
    count = 0
    for base in bases:
        for source in _inherited(path.parent / base, (*chain, path.resolve())):
            count += 1
            if count > _FILES:
                raise InputError(f"config file {shown} inherits from more than {_FILES} files")
            yield source
    yield f"file {shown}", tree


def _own_value(value: Any, name: str) -> Any:
    """Resolve the interpolations in a value that the user gave."""
    try:
        return OmegaConf.to_container(OmegaConf.create({"": value}), resolve=True)[""]  # type: ignore[call-overload,index]
    except _UNREADABLE as error:
        raise InputError(f"{name} cannot be read: {_first_line(error)}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, whose interpolations are not resolved."""
    shown = printable(path)
    try:
        if not path.is_file():
            raise InputError(
                f"config file not found: {shown}. Give an existing YAML file, configs/demo.yaml for instance."
            )
        if path.stat().st_size > _LONGEST:
            raise InputError(f"config file {shown} has more than {_LONGEST} bytes: that is no config")
        text = path.read_text(encoding="utf-8")
        if not isinstance(_composed(text, f"config file {shown}"), (yaml.MappingNode, type(None))):
            raise InputError(f"config file {shown} must hold 'key: value' lines")
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        assert isinstance(tree, dict), "its root is a mapping"
    except InputError:
        raise
    except (OSError, *_UNREADABLE) as error:
        raise InputError(f"config file {shown} is not valid YAML: {_one_line(error)}") from error
    strange = next((key for key in tree if not isinstance(key, str)), None)
    if strange is not None:
        raise InputError(
            f"config file {shown}: the key {printable(repr(strange))} must be a string, expected 'key: value'"
        )
    return typing.cast("dict[str, Any]", tree)


def _composed(text: str, name: str) -> yaml.Node | None:
    """Parse YAML without making values of it, and refuse aliases that would fill the memory."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and _extent(root, {}) > _NODES:
        raise InputError(f"{name}: its aliases (*name) stand for more than {_NODES} values")
    return root


def _extent(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values below a node, every alias counted as what it stands for; infinite where it holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is known
        children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        below = () if isinstance(node, yaml.ScalarNode) else children
        known[id(node)] = 1 + sum(_extent(child, known) for child in below)
    return known[id(node)]


def _parse_override(override: str) -> dict[str, Any]:
    shown = printable(override)
    key, equals, value = override.partition("=") if isinstance(override, str) else ("", "", "")
    if not equals or not key.strip():
        raise InputError(f"override '{shown}' is not of the form key=value, train.epochs=12 for instance")
    try:
        _composed(value, f"override '{shown}'")
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
    except InputError:
        raise
    except (AttributeError, *_UNREADABLE) as error:
        raise InputError(f"override '{shown}' cannot be read: {_first_line(error)}") from error
    return typing.cast("dict[str, Any]", tree)


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _merge(merged: DictConfig, plain: dict[str, Any], source: str, schema: type[Any]) -> DictConfig:
    tree = DictConfig({})
    try:
        tree = OmegaConf.create(plain)
        if missing := OmegaConf.missing_keys(tree):  # omegaconf would take the default without a word
            raise InputError(f"{source}: {', '.join(map(printable, sorted(missing)))} is '???': give a value")
        _check_groups(merged, tree, source)
        return typing.cast(DictConfig, OmegaConf.merge(merged, tree))
    except InputError:
        raise
    except ConfigKeyError as error:
        raise InputError(_unknown_key(str(error.full_key), source, schema)) from error
    except _UNREADABLE as error:
        key = str(getattr(error, "full_key", "") or "")
        value = _given(plain, key)
        if (key and value is not None) or (isinstance(error, OmegaConfBaseException) and key):
            raise InputError(_wrong_type(source, key, value, schema)) from error
        raise InputError(f"{source} cannot be read: {_first_line(error)}") from error


def _wrong_type(source: str, key: str, value: Any, schema: type[Any]) -> str:
    expected, kind = _expected_type(key, schema), type(value).__name__
    return f"{source}: {printable(key)} must be {expected}, got {printable(repr(value))} of type {kind}"


def _given(tree: Any, key: str) -> Any:
    """The value under a full key such as ``batch_former.layers[1]``, unresolved; None where there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _check_groups(merged: DictConfig, tree: DictConfig, source: str, prefix: str = "") -> None:
    """Where the schema has a group of settings, the tree must have one too: omegaconf's own message names no key."""
    for key in map(str, tree):
        known = merged.get(key) if key in merged else None
        if isinstance(known, ListConfig) and isinstance(tree._get_node(key), DictConfig):
            raise InputError(f"{source}: {prefix}{key} is a list: give all of it, {prefix}{key}=[...]")
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
    message = f"{source}: unknown key '{printable(key)}'."
    if near:
        message += f" Nearest known keys: {', '.join(near)}."
    return message + f" Known in {prefix.rstrip('.') or 'the config'}: {', '.join(siblings)}."


def _expected_type(key: str, schema: type[Any]) -> str:
    """The schema's type of a full key, in words."""
    hint: Any = schema
    for part in key.split("."):
        name, _, index = part.partition("[")
        hint = typing.get_type_hints(hint).get(name, Any) if dataclasses.is_dataclass(hint) else Any
        if index:
            hint = next(iter(typing.get_args(hint)), Any)
    if hint is Any:
        return "a plain value"
    return (
        hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("NoneType", "null")
    )


def _holds(rule: Rule, value: Any) -> bool:
    try:
        return rule.holds(value)
    except TypeError:  # a list within a list, for instance
        return False


def _check_values(group: Any, prefix: str = "") -> None:
    """Compare every value with what its field allows, and let groups of settings check what belongs together.

    In paths ``~`` becomes the user's home folder.
    """
    for field in dataclasses.fields(group):
        value, key = getattr(group, field.name), prefix + field.name
        choices, rule = field.metadata.get("choices"), field.metadata.get("rule")
        if dataclasses.is_dataclass(value):
            _check_values(value, f"{key}.")
        if choices and value not in choices:
            raise InputError(f"{key} must be one of {', '.join(choices)}; got '{printable(value)}'")
        if rule and value is not None and not _holds(rule, value):
            raise InputError(f"{key} must be {rule.wanted}, got {printable(value)}")
        if field.metadata.get("path") and value:
            setattr(group, field.name, os.path.expanduser(value))  # noqa: PTH111  an unknown ~user stays as it is
    if hasattr(group, "check_values"):
        group.check_values(prefix)
