"""Checkpoints: written atomically, read without executing anything, compared key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from detr_bf import distributed
from detr_bf.errors import InputError, prefix_errors
from detr_bf.files import atomic_write, check_weights, listed, read_torch
from detr_bf.structures import ClassMap
from detr_bf.text import printable

M = TypeVar("M", bound=nn.Module)

FORMAT = 1
_DEEPEST = 30  # levels of a stored config
_MOST = 2**53  # steps and images of a run: up to here a float64 is exact
_MIXER = re.compile(r"(?P<path>(?:.*\.)?mixers)\.(?P<mixer>shared|\d+)\.(?P<rest>.+)")  # of BatchFormerV2


@dataclass(frozen=True)
class Checkpoint:
    """Weights with what is needed to use them, and in ``training`` what is needed to go on."""

    model: dict[str, Tensor]
    class_map: dict[str, Any]  # ClassMap.to_dict
    config: dict[str, Any]
    ema: dict[str, Tensor] | None = None  # averaged weights, the ones to evaluate with
    training: dict[str, Any] | None = None  # optimiser, scaler, RNG, progress
    format: int = FORMAT

    @property
    def classes(self) -> ClassMap:
        return ClassMap.from_dict(self.class_map)

    def state_to_resume(self, source: str) -> dict[str, Any]:
        """Return the state with which training goes on.

        Raises:
            InputError: the checkpoint holds none.
        """
        if self.training is None:
            raise InputError(
                f"{source} holds weights alone (it was converted or stripped), and nothing to resume training with: "
                f"start another run from it with init_from={source} and another output_dir"
            )
        return self.training

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate with."""
        return self.ema if self.ema is not None else self.model

    def save(self, path: Path, previous: Path | None = None) -> None:
        """Write atomically: a crash leaves the file that was there whole, and success makes it ``previous``."""
        with atomic_write(path, previous) as temporary:
            torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, temporary)


def load_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint of ours whose every part has the structure that :meth:`Checkpoint.save` gives it.

    Raises:
        InputError: as :func:`detr_bf.files.read_torch`, or the file is of another program or version, or a part of it
            has another structure.
    """
    content = read_torch(path, own=True)
    expected = set(Checkpoint.__dataclass_fields__)
    if not isinstance(content, dict) or set(content) != expected:
        found = listed(sorted(map(str, content))) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise InputError(
            f"{path} is not a detr_bf checkpoint of format {FORMAT}: it holds {found or 'nothing'}; "
            f"expected {', '.join(sorted(expected))}"
        )
    if content["format"] != FORMAT or isinstance(content["format"], bool):
        raise InputError(
            f"{path} is a detr_bf checkpoint of format {printable(content['format'])}, and this version reads format "
            f"{FORMAT}: use the version of detr_bf that wrote it"
        )
    for name in ("model", "ema"):
        if name == "model" or content[name] is not None:
            check_weights(_mapping(content[name], name, path), str(path), finite=False)
    check_stored(content["config"], content["class_map"], path)
    if content["training"] is not None:
        _check_training(_mapping(content["training"], "training", path), path)
    return Checkpoint(**content)


def check_stored(config: Any, class_map: Any, path: Path) -> None:
    """Check the stored config, which must be plain data, and the stored class map.

    Raises:
        InputError: one of them has another structure.
    """
    _check_plain(_mapping(config, "config", path), "config", path)
    classes = _mapping(class_map, "class_map", path)
    ids: Any
    ids, names, things = (classes.get(name) for name in ("category_ids", "names", "is_thing"))
    columns = [column for column in (ids, names, things or None) if column is not None]
    valid = (
        _is_list_of(ids, int)
        and _is_list_of(names, str)
        and (not things or _is_list_of(things, bool))
        and len({len(column) for column in columns}) == 1
        and len(set(ids)) == len(ids)
    )
    if not valid:
        raise _malformed(path, "class_map", "lists of equal length: category_ids (distinct integers), names, is_thing")


def _check_training(training: Mapping[Any, Any], path: Path) -> None:
    optimizer = _mapping(training.get("optimizer"), "training.optimizer", path)
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not (_is_list_of(groups, dict) and groups and all(_is_list_of(group.get("params"), int) for group in groups)):
        raise _malformed(path, "training.optimizer.param_groups", "groups with the numbers of their parameters")
    for number, moments in _mapping(state, "training.optimizer.state", path).items():
        tensors = _mapping(moments, "training.optimizer.state", path).items()
        named = {f"optimizer.{number}.{name}": value for name, value in tensors if isinstance(value, Tensor)}
        check_weights(named, str(path), finite=False)
    _mapping(training.get("scaler"), "training.scaler", path)
    progress = _mapping(training.get("progress"), "training.progress", path)
    steps: Any = [progress.get("step"), progress.get("evaluated_step")]
    numbers = all(value is None or _is_number(value) for value in progress.values())
    if not (_is_list_of(steps, int) and numbers and 0 <= steps[1] <= steps[0] <= _MOST):
        raise _malformed(path, "training.progress", "the numbers 'step' and 'evaluated_step' and others of their kind")
    if not _is_list_of([training.get("averaged")], int):
        raise _malformed(path, "training.averaged", "a number of steps")
    rng = training.get("rng")
    states: Any = [{"cpu": rng, "cuda": None}] if isinstance(rng, Tensor) else rng  # a tensor in earlier checkpoints
    if not _is_list_of(states, dict) or not all(map(is_rng_state, states)):
        raise _malformed(path, "training.rng", "the generator states of every process")


def is_rng_state(state: Any) -> bool:
    """Return whether it is what :func:`rng_state` gives."""
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
    if depth > _DEEPEST:
        raise _malformed(path, key, f"at most {_DEEPEST} levels")
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise _malformed(path, key, "names of settings that are strings")
        for name, each in value.items():
            _check_plain(each, f"{key}.{name}", path, depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_plain(each, key, path, depth + 1)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise _malformed(path, key, f"plain values, not a {type(value).__name__}")


def _mapping(value: Any, name: str, path: Path) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _malformed(path, name, f"a dictionary, not a {type(value).__name__}")
    return value


def _is_list_of(values: Any, kind: type) -> bool:
    """Return whether it is a list or tuple of that type; True and False are no integers."""
    return isinstance(values, (list, tuple)) and all(
        isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for value in values
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _malformed(path: Path, name: str, expected: str) -> InputError:
    return InputError(
        f"{path} is a damaged checkpoint of detr_bf: '{printable(name)}' must hold {expected}. Use another copy of it"
    )


def is_checkpoint(path: Path) -> bool:
    """Whether the file is a checkpoint of ours, of any version, rather than somebody else's weights."""
    content = None if path.suffix == ".safetensors" else read_torch(path)
    return isinstance(content, dict) and {"class_map", "config"} <= set(content)


def load_strict(model: nn.Module, weights: Mapping[str, Tensor], source: str, *, finite: bool = True) -> None:
    """Load every weight into a model of the same architecture.

    Args:
        finite: refuse NaN and infinite weights; False to reproduce a fault.

    Raises:
        InputError: lists the keys that are missing, unexpected or of another shape, or whose values are not finite or
            not floating-point where the model's are.
    """
    _check_same_tensors(model, weights, source)
    check_weights(weights, source, finite=finite, model=model)
    model.load_state_dict(weights)


def build_and_load(
    build: Callable[[], M], weights: Mapping[str, Tensor], source: str | Path, *, finite: bool = True
) -> M:
    """Build the model of a stored config and load its weights.

    A file may hold any config: the model is built without memory first (on the meta device), and memory is taken only
    if its tensors are those of the file.

    Raises:
        InputError: the config is of no model, or as :func:`load_strict`.
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
    """Load what fits and say what does not, for fine-tuning with other classes or queries.

    BatchFormerV2 may be shared among its insertions in one of file and model, and not in the other.

    Args:
        whole_but: the one part of the model that may be left as it is, in whole or in part; None: any may.

    Raises:
        InputError: nothing fits, something outside ``whole_but`` does not, or what fits is not finite or not
            floating-point where the model's is.
    """
    check_weights(weights, source, finite=False)
    weights, renamed = _mixers_renamed(model, weights)
    missing, unexpected, other_shape = compare(model, weights)
    unfit = {line.split()[0] for line in other_shape}
    fitting = {name: value for name, value in weights.items() if name not in unfit and name not in unexpected}
    if not fitting:
        raise InputError(f"init_from: nothing in {source} fits this model." + _lines("its keys", sorted(weights)))
    if whole_but is not None:
        lacking = [line for line in (*missing, *other_shape) if not line.startswith(f"{whole_but}.")]
        if lacking:
            raise InputError(
                f"init_from: {source} does not hold all that stays frozen."
                + _lines("missing or different", lacking)
                + "\nUse the settings of the model it was trained with, or do not freeze it."
            )
    check_weights(fitting, source, model=model)
    model.load_state_dict(fitting, strict=False)
    return (
        f"init_from {source}: {len(fitting)} of the model's {len(model.state_dict())} tensors loaded"
        + _lines("of BatchFormerV2, loaded under another name", renamed)
        + _lines("not in the file, freshly initialised", missing)
        + _lines("of another shape, freshly initialised", other_shape)
        + _lines("in the file, not in the model, left out", unexpected)
    )


def _mixers_renamed(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Give mixers of the file the names that the model has for them, where one is shared and the other is not.

    A shared one becomes each of the model's; of several the first becomes the shared one, and the others are left out.
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
    """Keys missing in ``weights``, keys unknown to ``model``, and those of another shape with both shapes."""
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    other_shape = [
        f"{name} (file {tuple(weights[name].shape)}, model {tuple(value.shape)})"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    return missing, unexpected, other_shape


def training_state(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, progress: Any) -> dict[str, Any]:
    """Everything beside the weights that decides how training goes on; all processes call it together.

    The learning rate and the order of the data follow from the step in ``progress``. ``rng`` holds the generators of
    each process.
    """
    return {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "progress": asdict(progress),
        "rng": distributed.gather_to_main(rng_state()),
    }


def rng_state() -> dict[str, Any]:
    """The states of torch's generators in this process."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of :func:`rng_state`; the state of a GPU where there is one."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_rng(states: Any, seed: int) -> bool:
    """Set the generators of this process to those of its number among ``states``.

    Where there are fewer or more processes than saved states, it starts anew from ``seed``: False then.

    Raises:
        InputError: torch refuses the state.
    """
    if isinstance(states, Tensor):  # an earlier checkpoint, of one process
        states = [{"cpu": states, "cuda": None}]
    if len(states) != distributed.world_size():
        torch.manual_seed(seed)
        return False
    try:
        set_rng_state(states[distributed.rank()])
    except RuntimeError as error:
        raise InputError(
            f"the checkpoint's state of the random numbers is damaged ({error}): use an earlier checkpoint"
        ) from error
    return True


def _lines(title: str, names: Sequence[str]) -> str:
    return f"\n  {title} ({len(names)}): {listed(names)}" if names else ""
