"""Name tables between foreign checkpoints and ours, read in both directions.

A table is a list of rules; a rule names tensors, or modules whose tensors keep their own names below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detr_bf.errors import InputError

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """The same tensor, under each name of ``theirs``, is the parts ``ours`` in order along ``dim``.

    ``copies`` are further names of ours for the whole of it: a module that stands in two places. ``older`` are names of
    theirs that are read but not written: those of earlier releases.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    dim: int = 0
    copies: tuple[str, ...] = ()
    older: tuple[str, ...] = ()


def rename(theirs: str | Sequence[str], ours: str, *, older: Sequence[str] = ()) -> Rule:
    """One of ours, under one name or several of theirs."""
    return Rule((theirs,) if isinstance(theirs, str) else tuple(theirs), (ours,), older=tuple(older))


def within(module: str, rules: Iterable[Rule]) -> Iterator[Rule]:
    """``rules`` where all of theirs lies in their ``module``."""
    for rule in rules:
        theirs, older = (tuple(f"{module}.{name}" for name in names) for names in (rule.theirs, rule.older))
        yield replace(rule, theirs=theirs, older=older)


def to_ours(state: State, rules: Sequence[Rule]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under our names, and the names no rule knows.

    Raises:
        InputError: names of theirs that should hold the same tensor do not, or a tensor has no such parts.
    """
    known = _by_their_name(rules)
    ours: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        found = _longest(name, known)
        if found is None:
            unknown.append(name)
            continue
        rule, below = known[found], name[len(found) :]
        for part, value in zip(rule.ours, _parts(tensor, rule, name), strict=True):
            _put(ours, part + below, value, name)
        for copy in rule.copies:
            _put(ours, copy + below, tensor, name)
    return ours, unknown


def to_theirs(state: State, rules: Sequence[Rule]) -> tuple[dict[str, Tensor], list[str]]:
    """Inverse of :func:`to_ours`: tensors under their names, and names of ours no rule knows or that lack parts."""
    known = {name: rule for rule in rules for name in (*rule.ours, *rule.copies)}
    theirs: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        found = _longest(name, known)
        rule, below = (known[found], name[len(found) :]) if found else (None, "")
        if rule is None or any(part + below not in state for part in rule.ours):
            unknown.append(name)
        elif found == rule.ours[0]:  # the other parts are written with the first
            parts = [state[part + below] for part in rule.ours]
            whole = tensor if len(parts) == 1 else torch.cat(parts, rule.dim)
            theirs |= {target + below: whole for target in rule.theirs}
    return theirs, unknown


def unknown_names(names: Iterable[str], rules: Sequence[Rule]) -> list[str]:
    """The names of theirs that no rule knows."""
    known = _by_their_name(rules)
    return [name for name in names if _longest(name, known) is None]


def _by_their_name(rules: Sequence[Rule]) -> dict[str, Rule]:
    return {name: rule for rule in rules for name in (*rule.theirs, *rule.older)}


def _longest(name: str, known: Mapping[str, Rule]) -> str | None:
    return next((prefix for prefix in _prefixes(name) if prefix in known), None)


def _prefixes(name: str) -> Iterator[str]:
    """The name itself and the modules it lies in, from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _parts(tensor: Tensor, rule: Rule, name: str) -> Sequence[Tensor]:
    count = len(rule.ours)
    if count == 1:
        return [tensor]
    if tensor.dim() <= rule.dim or tensor.shape[rule.dim] % count:
        raise InputError(f"'{name}' of shape {tuple(tensor.shape)} should hold {count} tensors, but cannot be divided")
    return tensor.chunk(count, rule.dim)


def _put(ours: dict[str, Tensor], name: str, value: Tensor, source: str) -> None:
    if name in ours and not value.is_meta and not torch.equal(ours[name], value):
        raise InputError(f"'{source}' should hold the same tensor as another name of this checkpoint, but does not")
    ours[name] = value
