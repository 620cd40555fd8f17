"""Checkpoints: written atomically, read without executing anything, compared key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf import distributed
from detr_bf.errors import InputError
from detr_bf.files import atomic_write, read_torch, read_whole
from detr_bf.structures import ClassMap
from detr_bf.text import printable

FORMAT = 1
SHOWN = 8  # keys listed before "and N more"


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

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate with."""
        return self.ema if self.ema is not None else self.model

    def save(self, path: Path, previous: Path | None = None) -> None:
        """Write atomically: a crash leaves the file that was there whole, and success makes it ``previous``."""
        with atomic_write(path, previous) as temporary:
            torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, temporary)


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint of ours.

    Raises:
        InputError: as :func:`detr_bf.files.read_whole`, or the file is of another program or version.
    """
    content = read_whole(path)
    expected = set(Checkpoint.__dataclass_fields__)
    if not isinstance(content, dict) or set(content) != expected or content["format"] != FORMAT:
        found = _listed(sorted(map(str, content))) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise InputError(
            f"{path} is not a detr_bf checkpoint of format {FORMAT}: it holds {found}; "
            f"expected {', '.join(sorted(expected))}"
        )
    return Checkpoint(**content)


def is_checkpoint(path: Path) -> bool:
    """Whether the file is a checkpoint of ours, of any version, rather than somebody else's weights."""
    content = None if path.suffix == ".safetensors" else read_torch(path)
    return isinstance(content, dict) and {"class_map", "config"} <= set(content)


def load_strict(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load every weight into a model of the same architecture.

    Raises:
        InputError: lists the keys that are missing, unexpected or of another shape.
    """
    missing, unexpected, other_shape = compare(model, weights)
    if missing or unexpected or other_shape:
        raise InputError(
            f"{source} belongs to another architecture."
            + _lines("missing in the file", missing)
            + _lines("unknown to the model", unexpected)
            + _lines("of another shape", other_shape)
            + "\nUse the config it was trained with, or init_from=FILE to load what fits."
        )
    model.load_state_dict(weights)


def load_fitting(model: nn.Module, weights: Mapping[str, Tensor], source: str, whole_but: str | None = None) -> str:
    """Load what fits and say what does not, for fine-tuning with other classes or queries.

    Args:
        whole_but: the one part of the model that may be left as it is, in whole or in part; None: any may.

    Raises:
        InputError: nothing fits, or something outside ``whole_but`` does not.
    """
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
    model.load_state_dict(fitting, strict=False)
    return (
        f"init_from {source}: {len(fitting)} of the model's {len(model.state_dict())} tensors loaded"
        + _lines("not in the file, freshly initialised", missing)
        + _lines("of another shape, freshly initialised", other_shape)
        + _lines("in the file, not in the model, left out", unexpected)
    )


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
        "rng": distributed.gathered(rng_state()),
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
    """
    if isinstance(states, Tensor):  # an earlier checkpoint, of one process
        states = [{"cpu": states, "cuda": None}]
    if len(states) != distributed.world_size():
        torch.manual_seed(seed)
        return False
    set_rng_state(states[distributed.rank()])
    return True


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, names[:SHOWN])) + more


def _lines(title: str, names: Sequence[str]) -> str:
    return f"\n  {title} ({len(names)}): {_listed(names)}" if names else ""
