"""Declaration of a detector beside its builder: its own options and its needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.common.settings import settings_of
from detr_bf.detectors.detector import Detector, Options


@dataclass(frozen=True)
class DetectorKind:
    """Detector that is called as ``(backbone, channels of its feature maps, options, **own options)``.

    Args:
        build: builder, called with the shared options and, if there are any, the detector's own.
        own: dataclass of its own options, whose fields name their settings under ``model``.
        no_object: its class scores may contain no-object; not if it ranks tokens by class or draws classes as noise.
        from_tokens: its queries are the best tokens of the encoder.
        grouped: with ``from_tokens``, it has groups of further queries (``groups.group_detr``).
        two_stage: setting under ``model`` that makes its queries the best tokens, with or without groups.
        encoder_width: setting under ``model`` of the width of its encoder; after the encoder the tokens are
            ``hidden_dim`` wide, and batch attention has one place more there.
        masks_see_boxes: its mask head reads the boxes of the queries.
        bounded: the centres and sizes of its boxes are at most those of the image.
    """

    build: Callable[..., Detector]
    own: type | None = None
    no_object: bool = True
    from_tokens: bool = False
    grouped: bool = False
    two_stage: str | None = None
    encoder_width: str | None = None
    masks_see_boxes: bool = True
    bounded: bool = True

    @property
    def settings(self) -> list[str]:
        """Settings under ``model`` that it reads beside the shared ones."""
        return settings_of(self.own) if self.own else []

    def __call__(self, backbone: nn.Module, channels: Sequence[int], options: Options, **own: Any) -> Detector:
        if self.from_tokens and options.groups and not self.grouped:
            raise InputError(
                f"model.name={self.build.__name__} has no groups of further queries: set groups.one_to_many.queries=0 "
                "and groups.group_detr=1, or use another detector"
            )
        if self.own is None:
            built = self.build(backbone, channels, options, **own)
        else:
            built = self.build(backbone, channels, options, self.own(**own))
        former, queries = options.query_batch_former, built.decoder.get_submodule("queries")
        if former is not None and 0 in former.insertions and not getattr(queries, "content_from_tokens", False):
            raise InputError(
                f"model.name={self.build.__name__}: before decoder layer 0 its queries have the same contents in all "
                "images, so that they have nothing to exchange; with batch_former.at=queries give batch_former.layers "
                f"from 1 on, got {list(former.insertions)}"
            )
        return built


def declare(own: type | None = None, **needs: Any) -> Callable[[Callable[..., Detector]], DetectorKind]:
    """Decorate the builder of a detector with the fields of :class:`DetectorKind`."""
    return partial(DetectorKind, own=own, **needs)
