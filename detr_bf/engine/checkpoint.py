"""Checkpoints: written atomically, read without executing code, compared key by key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from detr_bf.common import distributed
from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import atomic_write, check_weights, is_number, read_torch
from detr_bf.common.low_rank import check_low_rank, merged
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed, printable
from detr_bf.evaluation import ScoreThresholds

M = TypeVar("M", bound=nn.Module)

CHECKPOINT_FORMAT = 1
_MAX_DEPTH = 30  # levels of a stored config
_MAX_STEPS = 2**53  # up to here a float64 is exact
_COUNTER = ".num_batches_tracked"
_MIXER = re.compile(r"(?P<path>(?:.*\.)?mixers)\.(?P<mixer>shared|\d+)\.(?P<rest>.+)")  # of BatchFormerV2


@dataclass(frozen=True)
class Checkpoint:
    """Weights, the class map and config to use them, and in ``training`` the state to resume training."""

    model: dict[str, Tensor]
    class_map: dict[str, Any]  # ClassMap.to_dict
    config: dict[str, Any]
    ema: dict[str, Tensor] | None = None  # averaged weights
    training: dict[str, Any] | None = None  # optimizer, scaler, RNG, progress
    thresholds: dict[str, Any] | None = None  # of a detector: ScoreThresholds of its last evaluation
    format: int = CHECKPOINT_FORMAT

    @property
    def classes(self) -> ClassMap:
        return ClassMap.from_dict(self.class_map)

    def state_to_resume(self, source: str) -> dict[str, Any]:
        """Return the training state (InputError: the checkpoint holds none)."""
        if self.training is None:
            raise InputError(
                f"{source} holds only weights (it was converted or stripped) and no training state to resume: start "
                f"another run from it with init_from={source} and another output_dir"
            )
        return self.training

    @property
    def score_thresholds(self) -> ScoreThresholds | None:
        """The scores from which detections are shown; None before the first evaluation."""
        stored = self.thresholds
        return None if stored is None else ScoreThresholds(stored["overall"], tuple(stored["by_class"]))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The averaged weights, if there are any and the last evaluation did not find the others better.

        Low-rank changes are merged into them.
        """
        raw_is_better = self.training is not None and bool(self.training["progress"].get("raw_is_better"))
        return merged(self.model if self.ema is None or raw_is_better else self.ema)

    def save(self, path: Path, previous: Path | None = None) -> None:
        """Write atomically: a crash leaves the old file intact, and success renames the old file to ``previous``."""
        with atomic_write(path, previous) as temporary:
            torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, temporary)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of this package and check the structure of every part.

    Raises:
        InputError: see :func:`detr_bf.common.files.read_torch`; the file is of another program or version, or a
            part of it has another structure.
    """
    content = read_torch(path, own=True)
    expected = set(Checkpoint.__dataclass_fields__)
    if not isinstance(content, dict) or set(content) != expected:
        found = listed(sorted(map(str, content))) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise InputError(
            f"{path} is not a detr_bf checkpoint of format {CHECKPOINT_FORMAT}: it holds {found or 'nothing'}; "
            f"expected {', '.join(sorted(expected))}"
        )
    if content["format"] != CHECKPOINT_FORMAT or isinstance(content["format"], bool):
        raise InputError(
            f"{path} is a detr_bf checkpoint of format {printable(content['format'])}, and this version reads format "
            f"{CHECKPOINT_FORMAT}: use the version of detr_bf that wrote it"
        )
    for name in ("model", "ema"):
        if name == "model" or content[name] is not None:
            check_weights(_mapping(content[name], name, path), str(path), finite=False)
            with prefix_errors(str(path)):
                check_low_rank(content[name])
    check_stored(content["config"], content["class_map"], path)
    if content["training"] is not None:
        _check_training(_mapping(content["training"], "training", path), path)
    if content["thresholds"] is not None:
        _check_thresholds(_mapping(content["thresholds"], "thresholds", path), len(content["class_map"]["names"]), path)
    return Checkpoint(**content)


def check_stored(config: Any, class_map: Any, path: Path) -> None:
    """Check the stored config, which must be plain data, and the stored class map.

    Raises:
        InputError: one of them has another structure.
    """
    _check_plain(_mapping(config, "config", path), "config", path)
    classes = _mapping(class_map, "class_map", path)
    columns: list[Any] = [classes.get(name) for name in ("category_ids", "names", "is_thing")]
    ids, names, things = columns
    valid = (
        _is_list_of(ids, int)
        and _is_list_of(names, str)
        and _is_list_of(things, bool)
        and len(set(ids)) == len(ids) == len(names) == len(things)
    )
    if not valid:
        raise _malformed(path, "class_map", "lists of equal length: category_ids (distinct integers), names, is_thing")


def _check_thresholds(thresholds: Mapping[Any, Any], num_classes: int, path: Path) -> None:
    overall, by_class = (thresholds.get(name) for name in ("overall", "by_class"))
    values = [overall, *by_class] if isinstance(by_class, list) else []
    if len(values) != num_classes + 1 or not all(isinstance(value, float) and 0 <= value <= 1 for value in values):
        raise _malformed(path, "thresholds", "'overall', a number from 0 to 1, and 'by_class' with one for each class")


def _check_training(training: Mapping[Any, Any], path: Path) -> None:
    optimizer = _mapping(training.get("optimizer"), "training.optimizer", path)
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not (_is_list_of(groups, dict) and groups and all(_is_list_of(group.get("params"), int) for group in groups)):
        raise _malformed(path, "training.optimizer.param_groups", "groups with the indices of their parameters")
    for number, moments in _mapping(state, "training.optimizer.state", path).items():
        tensors = _mapping(moments, "training.optimizer.state", path).items()
        named = {f"optimizer.{number}.{name}": value for name, value in tensors if isinstance(value, Tensor)}
        check_weights(named, str(path), finite=False)
    _mapping(training.get("scaler"), "training.scaler", path)
    progress = _mapping(training.get("progress"), "training.progress", path)
    steps: Any = [progress.get("step"), progress.get("evaluated_step")]
    numbers = all(value is None or is_number(value, -math.inf, math.inf) for value in progress.values())
    counts: Any = [*steps, progress.get("epoch"), progress.get("images")]
    valid = numbers and _is_list_of(counts, int) and all(0 <= count <= _MAX_STEPS for count in counts)
    if not (valid and steps[1] <= steps[0]):
        raise _malformed(path, "training.progress", "numbers, among them 'step' and 'evaluated_step'")
    for split, found in _mapping(training.get("data"), "training.data", path).items():
        _mapping(found, f"training.data.{split}", path)
    if not _is_list_of([training.get("averaged")], int):
        raise _malformed(path, "training.averaged", "a number of steps")
    states: Any = training.get("rng")
    if not _is_list_of(states, dict) or not all(map(is_rng_state, states)):
        raise _malformed(path, "training.rng", "the generator states of every rank")


def is_rng_state(state: Any) -> bool:
    """Return True for a value of :func:`rng_state`."""
    expected = torch.get_rng_state()
    return (
        isinstance(state, Mapping)
        and set(state) == {"cpu", "cuda"}
        and _is_bytes(state["cpu"])
        and state["cpu"].shape == expected.shape
        and (state["cuda"] is None or _is_bytes(state["cuda"]))
    )


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.device.type == "cpu"


def _check_plain(value: Any, key: str, path: Path, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise _malformed(path, key, f"at most {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise _malformed(path, key, "names of settings that are strings")
        for name, item in value.items():
            _check_plain(item, f"{key}.{name}", path, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, key, path, depth + 1)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise _malformed(path, key, f"plain values, not a {type(value).__name__}")


def _mapping(value: Any, name: str, path: Path) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _malformed(path, name, f"a dictionary, not a {type(value).__name__}")
    return value


def _is_list_of(values: Any, kind: type) -> bool:
    """Return True for a list or tuple of that type; True and False are not integers."""
    return isinstance(values, (list, tuple)) and all(
        isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for value in values
    )


def _malformed(path: Path, name: str, expected: str) -> InputError:
    return InputError(
        f"{path} is a damaged checkpoint of detr_bf: '{printable(name)}' must hold {expected}. Use another copy of it"
    )


def is_checkpoint(path: Path) -> bool:
    """Return True for a checkpoint of this package, of any version; False for other weights."""
    return _own_content(path) is not None


def _own_content(path: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint of this package, unchecked; None for other weights."""
    content = None if path.suffix == ".safetensors" else read_torch(path)
    return content if isinstance(content, dict) and {"class_map", "config"} <= set(content) else None


def stored_classes(path: Path) -> ClassMap | None:
    """Return the classes of a checkpoint of this package; None for other weights, and for a model without classes.

    Raises:
        InputError: see :func:`detr_bf.common.files.read_torch`; the classes are damaged.
    """
    if (content := _own_content(path)) is None:
        return None
    check_stored(content["config"], content["class_map"], path)
    classes = ClassMap.from_dict(content["class_map"])
    return classes if classes.num_classes else None


def load_strict(model: nn.Module, weights: Mapping[str, Tensor], source: str, *, finite: bool = True) -> None:
    """Load every weight into a model of the same architecture.

    Args:
        finite: refuse NaN and infinite weights; False to reproduce a fault.

    Raises:
        InputError: lists the keys that are missing, unexpected or of another shape, or whose values are not finite or
            not floating-point although the model's are.
    """
    _check_same_tensors(model, weights, source)
    check_weights(weights, source, finite=finite, model=model)
    model.load_state_dict(weights)


def build_and_load(
    build: Callable[[], M], weights: Mapping[str, Tensor], source: str | Path, *, finite: bool = True
) -> M:
    """Build the model of a stored config and load its weights.

    A file may hold any config, so the model is first built on the meta device, and memory is allocated only if its
    tensors match those of the file.

    Raises:
        InputError: the config gives no model; see :func:`load_strict`.
    """
    with prefix_errors(f"the config in {source}"), torch.device("meta"):
        outline = build()
    _check_same_tensors(outline, weights, str(source))
    model = build()
    load_strict(model, weights, str(source), finite=finite)
    return model


def _check_same_tensors(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    check_weights(weights, source, finite=False)
    missing, unexpected, other_shape = compare(model, weights)
    if missing or unexpected or other_shape:
        raise InputError(
            f"{source} belongs to another architecture."
            + _lines("missing in the file", missing)
            + _lines("unknown to the model", unexpected)
            + _lines("of another shape", other_shape)
            + "\nUse the config it was trained with, or init_from=FILE to load what fits."
        )


def load_fitting(model: nn.Module, weights: Mapping[str, Tensor], source: str, whole_but: str | None = None) -> str:
    """Load the weights that fit, for fine-tuning with other classes or queries; return a text about the others.

    BatchFormerV2 may be shared among its insertions in the file and not in the model, or the reverse. The counters of
    batch norms, which nothing here reads, may be on one side alone: norms with fixed statistics have none.

    Args:
        whole_but: pattern of the only names for which weights may be missing; None: they may be missing anywhere.

    Raises:
        InputError: nothing fits, weights outside ``whole_but`` are missing, or those that fit are not finite or not
            floating-point although the model's are.
    """
    check_weights(weights, source, finite=False)
    weights, renamed = _mixers_renamed(model, weights)
    missing, unexpected, other_shape = compare(model, weights)
    absent = {name for name in missing if name.endswith(_COUNTER)}
    missing = [name for name in missing if name not in absent]
    unfit = {line.split()[0] for line in other_shape}
    fitting = {name: value for name, value in weights.items() if name not in unfit and name not in unexpected}
    if not fitting:
        raise InputError(f"init_from: nothing in {source} fits this model." + _lines("its keys", sorted(weights)))
    if whole_but is not None:
        unloaded = [line for line in (*missing, *other_shape) if not re.match(whole_but, line)]
        if unloaded:
            raise InputError(
                f"init_from: {source} does not hold all weights that are frozen."
                + _lines("missing or different", unloaded)
                + "\nUse the settings of the model it was trained with, or do not freeze it."
            )
    check_weights(fitting, source, model=model)
    model.load_state_dict(fitting, strict=False)
    return (
        f"init_from {source}: {len(fitting)} of the model's {len(model.state_dict()) - len(absent)} tensors loaded"
        + _lines("of BatchFormerV2, loaded under another name", renamed)
        + _lines("not in the file, freshly initialised", missing)
        + _lines("of another shape, freshly initialised", other_shape)
        + _lines("in the file, not in the model, left out", [x for x in unexpected if not x.endswith(_COUNTER)])
    )


def _mixers_renamed(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the mixers of the file to those of the model, if only one of the two shares its mixer.

    A shared mixer is copied to each mixer of the model. Among several mixers the first becomes the shared one.
    """
    by_path: dict[str, set[str]] = {}
    for found in filter(None, map(_MIXER.fullmatch, weights)):
        by_path.setdefault(found["path"], set()).add(found["mixer"])
    result, renamed, taken = dict(weights), [], set()
    for name in model.state_dict():
        wanted = _MIXER.fullmatch(name)
        present = by_path.get(wanted["path"], set()) if wanted else set()
        if not wanted or not present or ("shared" in present) == (wanted["mixer"] == "shared"):
            continue
        source = "shared" if "shared" in present else min(present, key=int)
        old = f"{wanted['path']}.{source}.{wanted['rest']}"
        if old in weights:
            result[name] = weights[old]
            taken.add(old)
            renamed.append(f"mixers.{source} as mixers.{wanted['mixer']}")
    return {name: x for name, x in result.items() if name not in taken}, list(dict.fromkeys(renamed))


def compare(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str], list[str]]:
    """Return the keys missing in ``weights``, the keys unknown to ``model``, and keys of another shape with both."""
    tensors = model.state_dict()
    missing = [name for name in tensors if name not in weights]
    unexpected = [name for name in weights if name not in tensors]
    other_shape = [
        f"{name} (file {tuple(weights[name].shape)}, model {tuple(value.shape)})"
        for name, value in tensors.items()
        if name in weights and weights[name].shape != value.shape
    ]
    return missing, unexpected, other_shape


def rng_state() -> dict[str, Any]:
    """Return the states of torch's generators on this rank."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of :func:`rng_state`; a GPU state is ignored without a GPU."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_rng(states: Any, seed: int) -> bool:
    """Set the generators of this rank to its entry in ``states``.

    If the number of ranks has changed, seed them with ``seed`` and return False.

    Raises:
        InputError: torch refuses the state.
    """
    if len(states) != distributed.world_size():
        torch.manual_seed(seed)
        return False
    try:
        set_rng_state(states[distributed.rank()])
    except RuntimeError as error:
        raise InputError(
            f"the random states of the checkpoint are damaged ({error}): use an earlier checkpoint"
        ) from error
    return True


def _lines(title: str, names: Sequence[str]) -> str:
    return f"\n  {title} ({len(names)}): {listed(names)}" if names else ""
