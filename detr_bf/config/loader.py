"""Loading of configs: YAML files with inheritance, ``key=value`` overrides, and errors that name the wrong key.

A file may contain ``base: other.yaml``, or a list of files of which later ones win, relative to itself; it then states
only the differences. Values given by the user may contain omegaconf's interpolations, such as ``${oc.env:HOME}``. In
configs stored by runs and in checkpoints they are plain text, because a checkpoint may come from a stranger.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.extensions import is_stored, use_plugins
from detr_bf.common.text import printable
from detr_bf.config.common import RunConfig
from detr_bf.config.detection import DetectionConfig

SCHEMAS = {  # by task, module and class; the first one is the default, and the others are imported when asked for
    "detection": ("detr_bf.config.detection", "DetectionConfig"),
    "classification": ("detr_bf.classification.config", "ClassifierConfig"),
    "masked_autoencoding": ("detr_bf.classification.masked_config", "MaskedConfig"),
    "contrastive_learning": ("detr_bf.classification.contrastive_config", "ContrastiveConfig"),
    "segmentation": ("detr_bf.segmentation.config", "SegmentationConfig"),
}
_LONGEST = 2**18  # bytes of a config file
_NODES = 100_000  # values of a config file after its aliases are expanded
_DEEPEST = 100  # levels of nested settings
_FILES = 100  # base files of one config file, counted with repetition
# Raised by omegaconf and PyYAML, and by Python for numbers of thousands of digits and for deep nesting.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError, RecursionError, TypeError)


def schema_of(task: str) -> type[RunConfig]:
    """Return the config class of a task of :data:`SCHEMAS`."""
    module, name = SCHEMAS[task]
    schema: type[RunConfig] = getattr(import_module(module), name)
    return schema


def load_config(
    path: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = (), *, task: str | None = None
) -> Any:
    """Return the checked config of the task that the files name: defaults, then files, then overrides.

    Args:
        path: a YAML file, several of which later ones win, each after the files it inherits from, or None.
        overrides: ``key=value`` settings, which win over the files.
        task: expected task, also assumed if neither file nor override names one. Without it that is detection.

    Returns:
        an instance of ``schema_of(task)``. Unless given, ``output_dir`` is ``runs/NAME`` for the last ``NAME.yaml``.

    Raises:
        InputError: a file is missing or is not YAML, a key is unknown, a value has the wrong type or is out of range,
            or the task is not the expected one.
    """
    files = [Path(path)] if isinstance(path, (str, Path)) else [Path(each) for each in path or ()]
    sources = [source for file in files for source in _inherited(file, ())]
    sources += [(f"override '{printable(override)}'", parse_override(override)) for override in overrides]
    task = _task_of(sources, task)
    schema, merged = schema_of(task), deepcopy(_defaults(task))
    if files:
        sources.insert(0, ("the default of output_dir", _escaped({"output_dir": f"runs/{files[-1].stem}"}, "")))
    from_files = len(sources) - len(overrides)
    for layer in [*([source] for source in sources[:from_files]), sources[from_files:]]:
        _merge_layer(merged, layer, schema)
    try:
        config: Any = OmegaConf.to_object(merged)
    except _UNREADABLE as error:
        key = getattr(error, "full_key", None)
        where = f"config {', '.join(map(printable, files)) or None}:{f' {printable(key)}:' if key else ''}"
        raise InputError(f"{where} {_first_line(error)}") from error
    config.sources = {key: source for source, tree in sources for key in flatten_settings(tree)}
    _check_values(config)
    _name_files(config)
    return config


def own_settings(path: Path) -> list[str]:
    """Return the settings of a YAML file as overrides, without those of the files it inherits from.

    Raises:
        InputError: the file is missing or is not YAML.
    """
    tree = _read_yaml(path)
    tree.pop("base", None)
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in flatten_settings(tree).items()]


def packaged_configs() -> dict[str, Path]:
    """Return the files of ``configs/`` by name, without the files that only others inherit from."""
    folder = Path(str(resources.files("detr_bf.configs")))
    found = (path for path in sorted(folder.rglob("*.yaml")) if "detectron2" not in path.parts)
    return {path.stem: path for path in found if path.parent.name not in ("base", "compare")}


def packaged_experiments() -> dict[str, Path]:
    """Return the experiment files of ``configs/compare`` by name."""
    folder = Path(str(resources.files("detr_bf.configs"))) / "compare"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_from_dict(tree: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "the saved config") -> Any:
    """Inverse of :func:`config_to_dict`; the type of the result is that of the task in ``tree``.

    Interpolations are resolved in the overrides, which are the user's own, but not in the tree. Messages name the
    ``source``.

    Raises:
        InputError: unknown settings, or as :func:`load_config` for the overrides.
    """
    if not isinstance(tree, dict):
        raise InputError(f"{source}: expected a dictionary of settings, got {printable(repr(tree))}")
    task = _task_of([(source, tree)], None)
    schema, merged = schema_of(task), deepcopy(_defaults(task))
    if schema is DetectionConfig:  # settings saved before there was a divisor: those images were not rounded
        merged.data.transforms.size_divisor = 1
    _merge(merged, _escaped(tree, source), source, schema)
    given = [(f"override '{printable(override)}'", parse_override(override)) for override in overrides]
    _merge_layer(merged, given, schema)
    try:
        config: Any = OmegaConf.to_object(merged)
    except _UNREADABLE as error:  # text instead of a number, or an override that cannot be resolved
        key = str(getattr(error, "full_key", None) or "")
        raise InputError(_wrong_type(source, key, _given(tree, key), schema)) from error
    with prefix_errors(source):
        _check_values(config)
    if any("files" in parse_override(override).get("plugins", {}) for override in overrides):
        _name_files(config)  # those of the tree alone are not the user's
    return config


def _name_files(config: RunConfig) -> None:
    """Replace the files in ``plugins.files``, which the user has named, by their names and hashes (in-place).

    Raises:
        InputError: a file is missing.
    """
    plugins = getattr(config, "plugins", None)
    files: list[str] = getattr(plugins, "files", [])
    files[:] = [each if is_stored(each) else use_plugins(each)[0] for each in files]


def saved_config(path: Path, overrides: Sequence[str] = ()) -> Any:
    """Return the config in the ``config.yaml`` of a run, which is read as plain data, as that of a checkpoint.

    The overrides are the user's own, and replace its settings.

    Raises:
        InputError: as :func:`load_config`.
    """
    return config_from_dict(_unescaped(_read_yaml(path)), overrides, source=f"file {printable(path)}")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return plain dictionaries, lists and scalars, for checkpoints."""
    return dataclasses.asdict(config)


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested settings by full key, such as ``train.epochs``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def config_to_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML that :func:`load_config` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config_to_dict(config), "the config")))


def known_keys(schema: type[Any] = DetectionConfig, prefix: str = "") -> Iterator[str]:
    """Yield every full key of the schema, such as ``train.epochs``."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from known_keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _task_of(sources: Sequence[tuple[str, dict[str, Any]]], expected: str | None) -> str:
    """Return the task that the sources name.

    Raises:
        InputError: there is no such task, or two sources name different ones.
    """
    found, owner = expected, ""
    for source, tree in sources:
        if "task" not in tree:
            continue
        task = tree["task"]
        if not isinstance(task, str) or task not in SCHEMAS:
            raise InputError(f"{source}: task must be one of {', '.join(SCHEMAS)}; got '{printable(task)}'")
        if found not in (None, task):
            other = f"{owner} is of the task {found}" if owner else f"a config of the task {found} is expected"
            raise InputError(f"{source} is of the task {task}, but {other}; detr-bf train trains every task")
        found, owner = task, source
    return found or next(iter(SCHEMAS))


def _escaped(tree: Any, source: str, depth: int = 0) -> Any:
    """Return plain data whose text omegaconf does not interpolate: each ``${`` is escaped."""
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


def _inherited(path: Path, chain: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files that ``path`` inherits from, most basic first, then ``path`` itself, each with its settings."""
    shown, tree = printable(path), _read_yaml(path)
    if path.resolve() in chain:
        raise InputError(f"config files inherit in a circle: {' -> '.join(map(printable, (*chain, path)))}")
    try:
        named = OmegaConf.to_container(OmegaConf.create({"": tree.pop("base", [])}), resolve=True)[""]  # type: ignore[call-overload,index]
    except _UNREADABLE as error:
        raise InputError(f"config file {shown}: base cannot be read: {_first_line(error)}") from error
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise InputError(f"config file {shown}: base must name a file or a list of files, got {printable(repr(bases))}")
    count = 0
    for base in bases:
        if not os.path.lexists(path.parent / base):
            raise InputError(
                f"config file {shown}: base {printable(repr(base))} not found; the path is relative to this file"
            )
        for source in _inherited(path.parent / base, (*chain, path.resolve())):
            count += 1
            if count > _FILES:
                raise InputError(f"config file {shown} inherits from more than {_FILES} files")
            yield source
    yield f"file {shown}", tree


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a file, without resolving interpolations."""
    shown, text = printable(path), yaml_mapping(path, "config file")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except _UNREADABLE as error:
        raise InputError(f"config file {shown} is not valid YAML: {printable(' '.join(str(error).split()))}") from error
    assert isinstance(tree, dict), "its root is a mapping"
    strange = next((key for key in tree if not isinstance(key, str)), None)
    if strange is not None:
        raise InputError(
            f"config file {shown}: the key {printable(repr(strange))} must be a string, expected 'key: value'"
        )
    return typing.cast("dict[str, Any]", tree)


def yaml_mapping(path: Path, kind: str) -> str:
    """Return the text of a YAML file whose root is a mapping, or which is empty.

    Args:
        kind: of the file, for messages, such as ``config file``.

    Raises:
        InputError: the file is missing, too large, or not such a file.
    """
    shown = printable(path)
    try:
        if not path.is_file():
            raise InputError(f"{kind} not found: {shown}. Give an existing YAML file, such as configs/demo.yaml.")
        if path.stat().st_size > _LONGEST:
            raise InputError(f"{kind} {shown} has more than {_LONGEST} bytes, which is too large for a config")
        text = path.read_text(encoding="utf-8")
        if not isinstance(_composed(text, f"{kind} {shown}"), (yaml.MappingNode, type(None))):
            raise InputError(f"{kind} {shown} must contain 'key: value' lines")
    except InputError:
        raise
    except (OSError, *_UNREADABLE) as error:
        raise InputError(f"{kind} {shown} is not valid YAML: {printable(' '.join(str(error).split()))}") from error
    return text


def _composed(text: str, name: str) -> yaml.Node | None:
    """Parse YAML to nodes and refuse aliases that would fill the memory when they are expanded."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and _extent(root, {}) > _NODES:
        raise InputError(f"{name}: its aliases (*name) expand to more than {_NODES} values")
    return root


def _extent(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values below a node after expanding aliases; infinite for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is computed
        children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        below = () if isinstance(node, yaml.ScalarNode) else children
        known[id(node)] = 1 + sum(_extent(child, known) for child in below)
    return known[id(node)]


def parse_override(override: str) -> dict[str, Any]:
    """Return the nested settings of one ``key=value``, without resolving interpolations.

    Raises:
        InputError: it is not of this form, or its value is not YAML.
    """
    shown = printable(override)
    key, equals, value = override.partition("=") if isinstance(override, str) else ("", "", "")
    if not equals or not key.strip():
        raise InputError(f"override '{shown}' is not of the form key=value, such as train.epochs=12")
    try:
        node = _composed(value, f"override '{shown}'")
        is_text = node is None or (isinstance(node, yaml.ScalarNode) and not node.style and node.tag.endswith(":str"))
        if is_text and value[node.end_mark.index if node else 0 :].strip():  # YAML takes #b in "a #b" for a comment
            override = f"{key}={json.dumps(value.strip(), ensure_ascii=False)}"
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
    except InputError:
        raise
    except (AttributeError, *_UNREADABLE) as error:
        raise InputError(f"override '{shown}' cannot be read: {_first_line(error)}") from error
    return typing.cast("dict[str, Any]", tree)


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])


@cache
def _defaults(task: str) -> DictConfig:
    """Return the default settings; a caller that changes them copies them first."""
    return typing.cast(DictConfig, OmegaConf.structured(schema_of(task)))


def _merge(merged: DictConfig, plain: dict[str, Any], source: str, schema: type[Any]) -> None:
    """Check the keys and types of the settings of one source, and add the settings to the config (in-place)."""
    tree = DictConfig({})
    try:
        tree = OmegaConf.create(_null_as_empty(plain, schema))
        if missing := OmegaConf.missing_keys(tree):  # omegaconf would silently use the default
            raise InputError(f"{source}: {', '.join(map(printable, sorted(missing)))} is '???': give a value")
        _check_groups(merged, tree, source)
        merged.merge_with(tree)
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


def _merge_layer(merged: DictConfig, sources: Sequence[tuple[str, dict[str, Any]]], schema: type[Any]) -> None:
    """Add the settings of a file, or of all overrides, and remove earlier ones that these exclude (in-place)."""
    merged.merge_with(schema.superseded([tree for _, tree in sources]))
    for source, tree in sources:
        _merge(merged, tree, source, schema)


def _null_as_empty(tree: dict[str, Any], schema: type[Any]) -> dict[str, Any]:
    """Return the tree with "" for null where a setting is text and empty by default, such as ``data.root``."""
    hints = typing.get_type_hints(schema)
    found = dict(tree)
    for field in dataclasses.fields(schema):
        value = tree.get(field.name, "")
        if isinstance(value, dict) and dataclasses.is_dataclass(hints[field.name]):
            found[field.name] = _null_as_empty(value, hints[field.name])
        elif value is None and hints[field.name] is str and field.default == "":
            found[field.name] = ""
    return found


def _wrong_type(source: str, key: str, value: Any, schema: type[Any]) -> str:
    expected, kind = _expected_type(key, schema), type(value).__name__
    return f"{source}: {printable(key)} must be {expected}, got {printable(repr(value))} of type {kind}"


def _given(tree: Any, key: str) -> Any:
    """Return the unresolved value of a full key such as ``batch_former.layers[1]``; None if there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _check_groups(merged: DictConfig, tree: DictConfig, source: str, prefix: str = "") -> None:
    """Check that the tree has a group of settings for each group of the schema; omegaconf's message names no key.

    Raises:
        InputError: a value is given instead of a group, or a group instead of a list.
    """
    for key in map(str, tree):
        known = merged.get(key) if key in merged else None
        if isinstance(known, ListConfig) and isinstance(tree._get_node(key), DictConfig):
            raise InputError(f"{source}: {prefix}{key} is a list: give the whole list, {prefix}{key}=[...]")
        if not isinstance(known, DictConfig):
            continue
        given = tree._get_node(key)
        if not isinstance(given, DictConfig) or given._is_none():
            settings = ", ".join(map(str, known))
            raise InputError(f"{source}: {prefix}{key} is a group of settings ({settings}), not a value")
        _check_groups(known, given, source, f"{prefix}{key}.")


def _unknown_key(key: str, source: str, schema: type[Any]) -> str:
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
    if tasks := [task for task in SCHEMAS if schema_of(task) is not schema and key in known_keys(schema_of(task))]:
        message += f" It is a setting of task={' and of task='.join(tasks)}."
    return message + f" Known in {prefix.rstrip('.') or 'the config'}: {', '.join(siblings)}."


def _expected_type(key: str, schema: type[Any]) -> str:
    """Return the schema's type of a full key, in words."""
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


def _check_values(group: Any, prefix: str = "") -> None:
    """Check every value against the rule of its field, then call ``check_values`` of each group that has one.

    A leading ``~`` of a path is replaced by the user's home folder.

    Raises:
        InputError: a value is not allowed.
    """
    for field in dataclasses.fields(group):
        value, key = getattr(group, field.name), prefix + field.name
        choices, rule = field.metadata.get("choices"), field.metadata.get("rule")
        if dataclasses.is_dataclass(value):
            _check_values(value, f"{key}.")
        if choices and value not in choices:
            raise InputError(f"{key} must be one of {', '.join(choices)}; got '{printable(value)}'")
        if rule and not rule.allows(value):
            raise InputError(f"{key} must be {rule.wanted}, got {printable(value)}")
        if field.metadata.get("path") and value:
            setattr(group, field.name, os.path.expanduser(value))  # noqa: PTH111  leaves an unknown ~user unchanged
    if hasattr(group, "check_values"):
        group.check_values(prefix)
