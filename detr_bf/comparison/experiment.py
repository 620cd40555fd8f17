"""Experiment files: a base config, arms that differ in settings, seeds and folds, and the cells that they make.

A cell is one training run: an arm, a seed and, if the file states ``folds``, a fold.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import is_number
from detr_bf.common.text import listed, printable
from detr_bf.config import (
    RunConfig,
    config_to_dict,
    flatten_settings,
    load_config,
    packaged_configs,
    parse_override,
    yaml_mapping,
)

KEYS = (
    *("base", "overrides", "arms", "baseline", "contrasts", "contrasts_only", "seeds", "folds", "jobs", "primary"),
    *("title", "resamples"),
)
REQUIRED = ("base", "arms", "seeds")
ARM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
FOLD_KEYS = ("data.folds", "data.fold")
RESAMPLES = 2000  # of the bootstrap over images, unless the file states a number
QUICK = ("train.max_steps=4",)
QUICK_RESAMPLES = 50
QUICK_SECONDS = 10  # of a command
COMMAND_VARIABLES = (  # of a command; {output} is its folder
    *("python", "train_images", "train_annotations", "val_images", "val_annotations", "seed", "output"),
    *("seconds", "minutes"),
)
COMMAND_VARIABLE = re.compile(r"\{(\w+)\}")
MOST = {"seeds": 1000, "folds": 100, "jobs": 1000, "resamples": 100_000}
CLASS_METRIC = "AP/"  # and the name of a class: its AP
_BOX_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
_PANOPTIC_METRICS = ("PQ", "SQ", "RQ", "PQ_th", "PQ_st")
_CLASSIFIER_METRICS = ("top1", "balanced", "many", "medium", "few")


class ExperimentCell(NamedTuple):
    """One training run of an experiment."""

    arm: str
    seed: int
    fold: int | None

    @property
    def name(self) -> str:
        """``ARM/seed_S`` or ``ARM/seed_S_fold_F``."""
        return f"{self.arm}/seed_{self.seed}" + ("" if self.fold is None else f"_fold_{self.fold}")

    @classmethod
    def named(cls, arm: str, name: str) -> ExperimentCell | None:
        """Return the cell of the name ``seed_S`` or ``seed_S_fold_F``, None for any other name."""
        found = re.fullmatch(r"seed_(\d{1,19})(?:_fold_(\d{1,4}))?", name)
        return cls(arm, int(found[1]), None if found[2] is None else int(found[2])) if found else None


@dataclass(frozen=True)
class Experiment:
    """Checked content of an experiment file."""

    name: str  # of the file, without its suffix
    title: str
    base: tuple[Path, ...]  # config files that every cell starts from
    arms: Mapping[str, tuple[str, ...]]  # name -> settings of the arm, key=value
    commands: Mapping[str, Mapping[str, Any]]  # arms that a command trains -> ``command`` and perhaps ``seconds``
    common: tuple[str, ...]  # settings of all cells before those of the arm
    extra: tuple[str, ...]  # settings of all cells after those of the arm, from the command line
    configs: Mapping[str, RunConfig]  # of each arm, with the first seed and fold
    baseline: str
    contrasts: tuple[tuple[str, str], ...]  # pairs of arms to compare besides each arm with the baseline
    contrasts_only: bool  # compare these pairs alone, which may then include the baseline
    seeds: tuple[int, ...]
    num_folds: int | None  # None without ``folds``
    folds: tuple[int | None, ...]  # indices of those to train; (None,) without ``folds``
    jobs: int
    primary: str  # the metric that the verdict is about
    resamples: int

    def cells(self) -> list[ExperimentCell]:
        """Return all cells, seed by seed and fold by fold, so that an unfinished experiment has whole comparisons."""
        return [ExperimentCell(arm, seed, fold) for seed in self.seeds for fold in self.folds for arm in self.arms]

    def overrides(self, cell: ExperimentCell) -> list[str]:
        """Return all settings of a cell but ``output_dir``."""
        settings = _overrides(self.common, self.arms[cell.arm], self.extra, self.num_folds, cell.fold)
        return [*settings, f"seed={cell.seed}"]

    def config(self, cell: ExperimentCell) -> RunConfig:
        """Return the config of a cell, with the default ``output_dir`` of its base."""
        config: RunConfig = load_config(self.base, self.overrides(cell))
        return config

    def settings(self, cell: ExperimentCell) -> dict[str, Any]:
        """Return the value of every setting of a cell by full key, without those that differ between its runs."""
        found = {**flat_settings(self.configs[cell.arm]), **self.commands.get(cell.arm, {})}
        return found if cell.fold is None else {**found, "data.fold": cell.fold}


def read_experiment(path: Path, extra: Sequence[str] = (), *, quick: bool = False) -> Experiment:
    """Read an experiment file and check it with the configs of all arms.

    Args:
        path: of the YAML file.
        extra: settings of all cells, which win over those of the file.
        quick: one seed, one fold, four training steps and few resamples, to try the file out.

    Raises:
        InputError: naming the file and the key that is wrong.
    """
    text = yaml_mapping(path, "experiment file")
    with prefix_errors(f"experiment file {printable(path)}"):
        tree = _parsed(text)
        arms, commands = _arms(tree["arms"])
        seeds, folds = _seeds(tree["seeds"]), _number(tree, "folds", None, least=2)
        base = tuple(_base(path.parent, text) for text in _texts(tree["base"], "base"))
        common = _settings("overrides", tree.get("overrides"))
        extra = (*extra, *QUICK) if quick else tuple(extra)
        taken = FOLD_KEYS if folds else ()
        _check_free("overrides", common, ("seed", "output_dir", *taken))
        _check_free("the command line", extra, ("seed", "output_dir", *taken))
        configs = {}
        for name, own in arms.items():
            _check_free(f"arms.{name}", own, ("seed", "output_dir", *FOLD_KEYS))
            with prefix_errors(f"arms.{name}"):
                configs[name] = load_config(base, _overrides(common, own, extra, folds, 0 if folds else None))
        _check_different(configs, commands)
        if quick:
            quick_seconds = {"seconds": QUICK_SECONDS}
            commands = {name: own | quick_seconds if "seconds" in own else own for name, own in commands.items()}
        resamples = _number(tree, "resamples", RESAMPLES) or RESAMPLES
        return Experiment(
            name=path.stem,
            title=_text(tree, "title", path.stem),
            base=base,
            arms=arms,
            commands=commands,
            common=common,
            extra=extra,
            configs=configs,
            baseline=_arm(tree.get("baseline", next(iter(arms))), arms, "baseline"),
            contrasts=_contrasts(tree, arms),
            contrasts_only=bool(tree.get("contrasts_only")),
            seeds=seeds[:1] if quick else seeds,
            num_folds=folds,
            folds=tuple(range(1 if quick else folds)) if folds else (None,),
            jobs=_number(tree, "jobs", 1) or 1,
            primary=_primary(tree, next(iter(configs.values()))),
            resamples=QUICK_RESAMPLES if quick else resamples,
        )


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return the value of every setting by full key, without ``output_dir`` and ``seed``, as JSON reads it back."""
    flat = flatten_settings(config_to_dict(config))
    del flat["output_dir"], flat["seed"]
    found: dict[str, Any] = json.loads(json.dumps(flat))
    return found


def default_primary(settings: Mapping[str, Any]) -> str:
    """Return the primary metric of runs with these settings: AP, PQ with panoptic data, or top1 of classifiers.

    Raises:
        InputError: such runs measure nothing that can be compared.
    """
    task = settings.get("task")
    if task == "classification":
        return "top1"
    if task != "detection":
        raise InputError(f"runs of the task {task} cannot be compared: expected detection or classification")
    return "PQ" if settings.get("model.masks") and settings.get("data.val.panoptic") else "AP"


def _overrides(
    common: Sequence[str], own: Sequence[str], extra: Sequence[str], folds: int | None, fold: int | None
) -> list[str]:
    return [*common, *own, *extra, *(() if folds is None else (f"data.folds={folds}", f"data.fold={fold}"))]


class _Loader(yaml.SafeLoader):
    """Loader with keys as text (``off`` is a name, not a boolean), 1e-4 as a number, and errors for repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(problem="a key must be text", problem_mark=key_node.start_mark)
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key '{printable(key)}' is given twice", problem_mark=key_node.start_mark
                )
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parsed(text: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _Loader) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"not valid YAML: {printable(' '.join(str(error).split()))}") from error
    unknown = next((key for key in tree if key not in KEYS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, KEYS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise InputError(f"unknown key '{printable(unknown)}'.{hint} Known keys: {', '.join(KEYS)}")
    if missing := [key for key in REQUIRED if tree.get(key) is None]:
        raise InputError(f"{' and '.join(missing)} must be given; docs/comparing.md has an example")
    return tree


def _texts(value: Any, key: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) and each for each in texts):
        raise InputError(f"{key} must be text or a list of texts, got {printable(repr(value))}")
    return texts


def _base(folder: Path, text: str) -> Path:
    """Return the config file of the name ``text``, relative to ``folder`` or packaged."""
    path = folder / text
    if os.path.lexists(path):
        return Path(os.path.normpath(path))
    known = packaged_configs()
    if text in known:
        return known[text]
    near = difflib.get_close_matches(text, known, n=3)
    hint = f"; nearest packaged configs: {', '.join(near)}" if near else ""
    raise InputError(
        f"base '{printable(text)}' is neither a file (relative to the experiment file) nor the name of a packaged "
        f"config{hint}"
    )


def _settings(key: str, value: Any) -> tuple[str, ...]:
    """Return settings as ``key=value``, given as such or as a nested mapping."""
    if value is None:
        return ()
    if isinstance(value, dict):
        return tuple(_assignments(value))
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InputError(
            f"{key} must be a list of key=value, such as [batch_former.enabled=false], or a mapping of settings; got "
            f"{printable(repr(value))}"
        )
    return tuple(value)


def _assignments(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _assignments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def _arms(value: Any) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Any]]]:
    """Return the settings of all arms, and ``command`` and ``seconds`` of those that a command trains."""
    if not isinstance(value, dict) or len(value) < 2:
        raise InputError(
            f"arms must map two or more names to settings, such as 'off: [batch_former.enabled=false]'; got "
            f"{printable(repr(value))}"
        )
    for name in value:
        if not ARM_NAME.fullmatch(name):
            raise InputError(
                f"arms: the name '{printable(name)}' must begin with a letter, a digit or _, have only letters, "
                "digits, _, . and -, and at most 100 of them"
            )
    settings, commands = {}, {}
    for name, own in value.items():
        if isinstance(own, dict) and "command" in own:
            commands[name] = arm_command(f"arms.{name}", own)
            own = {key: each for key, each in own.items() if key not in ("command", "seconds")}
        settings[name] = _settings(f"arms.{name}", own)
    return settings, commands


def arm_command(where: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``command`` and, if given, ``seconds`` of an arm (InputError: one of them is wrong)."""
    text, seconds = own["command"], own.get("seconds")
    try:
        words = shlex.split(text) if isinstance(text, str) else []
    except ValueError as error:
        raise InputError(f"{where}.command: {error}; the words of a command are split as in a shell") from None
    if not words or not all(word.isprintable() for word in words):
        raise InputError(f"{where}.command must be one command line, got {printable(repr(text))}")
    used = COMMAND_VARIABLE.findall(text)
    if unknown := [name for name in used if name not in COMMAND_VARIABLES]:
        raise InputError(f"{where}.command: unknown variable {listed(unknown)}; known: {', '.join(COMMAND_VARIABLES)}")
    if "output" not in used:
        raise InputError(f"{where}.command must use {{output}}, the folder to which it writes results.json")
    if seconds is None and not {"seconds", "minutes"} & {*used}:
        return {"command": text.strip()}
    if not is_number(seconds, 1, 1e7):
        raise InputError(f"{where}.seconds must be a number from 1, got {printable(repr(seconds))}")
    return {"command": text.strip(), "seconds": seconds}


def check_program(line: str) -> None:
    """Check that the program of a command exists (InputError: it does not)."""
    program = shlex.split(line)[0]
    if not COMMAND_VARIABLE.search(program) and shutil.which(program) is None:
        raise InputError(f"command: there is no program {printable(program)}; {{python}} is the one that runs detr-bf")


def _check_free(where: str, overrides: Sequence[str], taken: Sequence[str]) -> None:
    """Refuse settings that the experiment itself gives to every cell, and control characters, which are printed."""
    for override in overrides:
        if not override.isprintable():
            raise InputError(f"{where}: '{printable(override)}' has control characters: leave them out")
        with prefix_errors(where):
            tree = parse_override(override)
        for key in flatten_settings(tree):
            if key in taken:
                raise InputError(
                    f"{where} sets {key}, which the experiment sets for each cell: leave it out (seeds, folds and "
                    "--output choose the values)"
                )


def _check_different(configs: Mapping[str, RunConfig], commands: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse arms of different tasks, arms with equal settings, and commands where not only boxes are evaluated."""
    first, *others = configs
    for name in others:
        if configs[name].task != configs[first].task:
            raise InputError(
                f"arms.{name} is of the task {configs[name].task}, arms.{first} of {configs[first].task}: all arms "
                "must be of one task"
            )
    known: dict[str, str] = {}
    for name, config in configs.items():
        settings = flat_settings(config)
        if name in commands and (settings.get("model.masks") or default_primary(settings) != "AP"):
            raise InputError(
                f"arms.{name}.command: a command detects boxes, and the config has classes or masks of images"
            )
        content = json.dumps({**settings, **commands.get(name, {})}, sort_keys=True)
        if content in known:
            raise InputError(
                f"arms.{name} has the same settings as arms.{known[content]}, once all are resolved: change or remove "
                "one of them"
            )
        known[content] = name


def _seeds(value: Any) -> tuple[int, ...]:
    if type(value) is int and 1 <= value <= MOST["seeds"]:
        return tuple(range(value))
    if not isinstance(value, list) or not value or not all(type(seed) is int and 0 <= seed < 2**63 for seed in value):
        raise InputError(
            f"seeds must be a number from 1 to {MOST['seeds']}, or a list of integers from 0; got "
            f"{printable(repr(value))}"
        )
    repeated = [seed for index, seed in enumerate(value) if seed in value[:index]]
    if repeated:
        raise InputError(f"seeds: {listed(dict.fromkeys(repeated))} is given twice: each seed must differ")
    return tuple(value)


def _number(tree: Mapping[str, Any], key: str, default: int | None, least: int = 1) -> int | None:
    value = tree.get(key, default)
    if value is not default and not (type(value) is int and least <= value <= MOST[key]):
        raise InputError(f"{key} must be an integer from {least} to {MOST[key]}, got {printable(repr(value))}")
    return value


def _text(tree: Mapping[str, Any], key: str, default: str) -> str:
    value = tree.get(key, default)
    if not isinstance(value, str):
        raise InputError(f"{key} must be text, got {printable(repr(value))}")
    return value


def _arm(value: Any, arms: Mapping[str, Any], key: str) -> str:
    """Return the name of an arm that the file names under ``key``."""
    names = {True: ("on", "yes"), False: ("off", "no")}.get(value, ()) if isinstance(value, bool) else (str(value),)
    found = next((name for name in names if name in arms), None)  # YAML reads these four words as booleans
    if found is None:
        raise InputError(f"{key} must be one of the arms {', '.join(arms)}; got {printable(repr(value))}")
    return found


def _contrasts(tree: Mapping[str, Any], arms: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    value = tree.get("contrasts", [])
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise InputError(
            "contrasts must be a list of pairs of arms, such as [[two_stream, self_only]]; got "
            f"{printable(repr(value))}"
        )
    pairs = [(_arm(one, arms, "contrasts"), _arm(other, arms, "contrasts")) for one, other in value]
    only = tree.get("contrasts_only", False)
    if type(only) is not bool or (only and not pairs):
        raise InputError(f"contrasts_only must be true or false, and needs contrasts; got {printable(repr(only))}")
    baseline = None if only else _arm(tree.get("baseline", next(iter(arms))), arms, "baseline")
    for index, pair in enumerate(pairs):
        if len(set(pair)) < 2 or baseline in pair or pair in pairs[:index] or pair[::-1] in pairs[:index]:
            raise InputError(
                f"contrasts: [{', '.join(pair)}] must be two different arms, none of them the baseline (every arm is "
                "compared with it anyway, unless contrasts_only is true), and given once"
            )
    return tuple(pairs)


def _primary(tree: Mapping[str, Any], config: RunConfig) -> str:
    default = default_primary(flat_settings(config))
    value = _text(tree, "primary", default)
    known = {"PQ": _PANOPTIC_METRICS, "AP": _BOX_METRICS, "top1": _CLASSIFIER_METRICS}[default]
    if value not in known and not (default == "AP" and value.startswith(CLASS_METRIC)):
        classes = f", {CLASS_METRIC}CLASS" if default == "AP" else ""
        raise InputError(f"primary must be one of {', '.join(known)}{classes}; got '{printable(value)}'")
    return value
