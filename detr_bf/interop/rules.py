"""Rules that rename tensors between foreign checkpoints and ours, in both directions.

A table is a list of rules. A rule renames a tensor, or a module with all tensors in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile

import torch
from torch import Tensor

from detr_bf.common.errors import InputError

State = Mapping[str, Tensor]
BODY = "backbone.body"  # our name of a backbone's network
BOX_HEAD = "bbox_embed.{}.layers.0.weight"  # the authors' name of a layer's head


@dataclass(frozen=True)
class NameRule:
    """One foreign tensor or module and its counterparts in our models."""

    theirs: tuple[str, ...]  # all names of it; of a joined one the names of its parts
    ours: tuple[str, ...]  # our parts, concatenated in this order along dim
    dim: int = 0
    copies: tuple[str, ...] = ()  # our other names of the whole tensor: a module that is used twice
    older: tuple[str, ...] = ()  # further foreign names, read but not written
    joined: bool = False  # ours is one tensor, the concatenation of theirs along dim; empty name: zeros, unwritten


@dataclass(frozen=True)
class Layout:
    """Number of layers and variant of a checkpoint, foreign or ours, derived from its names."""

    encoder_layers: int
    decoder_layers: int
    refine: bool  # separate box heads for every decoder layer
    two_stage: bool  # queries from encoder proposals
    class_heads: int  # length of the list of class heads, 0: no list
    shared_heads: frozenset[str]  # of ``classes`` and ``boxes``, those of which all decoder layers use the same
    batch_former_layers: frozenset[int]  # encoder layers with a separate BatchFormer
    batch_former_depth: int  # layers of one BatchFormer
    backbone_blocks: int  # blocks of the longest ResNet stage
    finer_encoders: int  # levels with encoder layers in a hybrid encoder besides the coarsest

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Layout:
        text = "\n".join(state)
        two_stage = bool(re.search(r"\b(?:transformer|model)\.enc_output\.|\bdecoder\.queries\.box_head\.", text))
        own_heads = r"decoder\.bbox_embed\.|decoder\.heads\.boxes\.1\."
        own = re.findall(r"(?:\btransformer\.bf|\.encoder\.bf|\.mixers)\.(\d+)\.", text)
        return cls(
            encoder_layers=_count(r"encoder\.(?:(?:encoder|aifi)\.0\.)?layers\.(\d+)\.", text),
            decoder_layers=_count(r"decoder\.layers\.(\d+)\.", text),
            refine=two_stage or bool(re.search(own_heads, text)) or _differ(state, BOX_HEAD),
            two_stage=two_stage,
            shared_heads=frozenset(name for name in ("classes", "boxes") if _is_shared(name, state, text)),
            class_heads=_count(r"(?:\bclass_embed|heads\.classes)\.(\d+)\.", text),
            batch_former_layers=frozenset(map(int, own)),
            batch_former_depth=_count(r"(?:\.bf|\.bf\.\d+|\.mixers\.\w+)\.layers\.(\d+)\.", text) or 1,
            backbone_blocks=_count(r"\bstages\.\d+\.layers\.(\d+)\.|\b(?:layer|res)\d\.(\d+)\.", text),
            finer_encoders=max(
                _count(r"\bencoder\.encoder\.(\d+)\.layers\.", text) - 1, _count(r"\bencoder\.finer\.(\d+)\.", text)
            ),
        )


def rename(theirs: str | Sequence[str], ours: str, *, older: Sequence[str] = ()) -> NameRule:
    """Return the rule for one name of ours with one or several foreign names."""
    return NameRule((theirs,) if isinstance(theirs, str) else tuple(theirs), (ours,), older=tuple(older))


def within(module: str, rules: Iterable[NameRule]) -> Iterator[NameRule]:
    """Yield ``rules`` with all foreign names inside the foreign ``module``."""
    for rule in rules:
        theirs, older = (tuple(name and f"{module}.{name}" for name in names) for names in (rule.theirs, rule.older))
        yield replace(rule, theirs=theirs, older=older)


def to_ours(state: State, rules: Sequence[NameRule]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under our names, and the names without a rule.

    Raises:
        InputError: foreign names of one tensor hold different values, or a tensor cannot be divided into its parts.
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
        if rule.joined:
            names = [part and part + below for part in rule.theirs]
            if any(each not in state for each in filter(None, names)):
                unknown.append(name)
            elif name == names[0]:  # the other parts are read with the first
                parts = [state[each] if each else torch.zeros_like(tensor) for each in names]
                _put(ours, rule.ours[0] + below, torch.cat(parts, rule.dim), name)
            continue
        for part, value in zip(rule.ours, _parts(tensor, len(rule.ours), rule.dim, name), strict=True):
            _put(ours, part + below, value, name)
        for copy in rule.copies:
            _put(ours, copy + below, tensor, name)
    return ours, unknown


def to_theirs(state: State, rules: Sequence[NameRule]) -> tuple[dict[str, Tensor], list[str]]:
    """Invert :func:`to_ours`; return tensors under foreign names, and our names without a rule or without all parts."""
    known = {name: rule for rule in rules for name in (*rule.ours, *rule.copies)}
    theirs: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        found = _longest(name, known)
        rule, below = (known[found], name[len(found) :]) if found else (None, "")
        if rule is None or any(part + below not in state for part in rule.ours):
            unknown.append(name)
        elif found == rule.ours[0]:  # the other parts are written with the first
            if rule.joined:
                pieces = _parts(tensor, len(rule.theirs), rule.dim, name)
                theirs |= {part + below: piece for part, piece in zip(rule.theirs, pieces, strict=True) if part}
                continue
            parts = [state[part + below] for part in rule.ours]
            whole = tensor if len(parts) == 1 else torch.cat(parts, rule.dim)
            theirs |= {target + below: whole for target in rule.theirs}
    return theirs, unknown


def unknown_names(names: Iterable[str], rules: Sequence[NameRule]) -> list[str]:
    """Return the foreign names without a rule."""
    known = _by_their_name(rules)
    return [name for name in names if _longest(name, known) is None]


def _by_their_name(rules: Sequence[NameRule]) -> dict[str, NameRule]:
    return {name: rule for rule in rules for name in (*rule.theirs, *rule.older) if name}


def _longest(name: str, known: Mapping[str, NameRule]) -> str | None:
    """Return the name itself or the innermost of its modules that has a rule."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def _parts(tensor: Tensor, count: int, dim: int, name: str) -> Sequence[Tensor]:
    if count == 1:
        return [tensor]
    if tensor.dim() <= dim or tensor.shape[dim] % count:
        raise InputError(f"'{name}' of shape {tuple(tensor.shape)} should hold {count} tensors, but cannot be divided")
    return tensor.chunk(count, dim)


def _put(ours: dict[str, Tensor], name: str, value: Tensor, source: str) -> None:
    if name in ours and not value.is_meta and not torch.equal(ours[name], value):
        raise InputError(f"'{source}' should hold the same tensor as another name of this checkpoint, but does not")
    ours[name] = value


def _count(pattern: str, text: str) -> int:
    return max((int(match[match.lastindex or 1]) + 1 for match in re.finditer(pattern, text)), default=0)


def _is_shared(heads: str, state: Mapping[str, Tensor], text: str) -> bool:
    """Return True if there is one head, in our lists or repeated in the authors', whose names have no values."""
    if re.search(rf"decoder\.heads\.{heads}\.0\.", text):
        return not re.search(rf"decoder\.heads\.{heads}\.1\.", text)
    theirs = {"classes": "class_embed.{}.weight", "boxes": BOX_HEAD}[heads]
    return not _differ(state, theirs)


def _differ(state: Mapping[str, Tensor], name: str) -> bool:
    """Return True if the heads of the decoder layers have different values; without refinement a list repeats one."""
    names = takewhile(state.__contains__, map(name.format, count()))
    first, *others = [state[each] for each in names] or [torch.empty(0)]
    return not first.is_meta and not all(torch.equal(first, other) for other in others)
