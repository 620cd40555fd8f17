"""Batch attention in timm and torchvision models: BatchFormerV2 between ViT blocks, BatchFormer before a classifier.

Shape legend: B images, R rows (streams x images, clean stream first), S tokens with the class token, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer import BatchFormer, BatchFormerV2
from detr_bf.batchformer.mixers import BatchFormerLayer
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.common.weights import PLUGINS
from detr_bf.plugins.plugin import Plugin, chosen, require_vit

IMAGENET_LAYER = 7  # the eighth; early layers diverged in the paper
INITS = ("xavier", "pytorch")


T = TypeVar("T", BatchFormer, BatchFormerV2)


class BatchAttention(Plugin, Generic[T]):
    """Base class of both kinds; a model can have one of them. ``batch_former`` is the module.

    Args:
        init: ``xavier``: every matrix as in DETR's transformer; ``pytorch``: as in ``nn.TransformerEncoderLayer``, like
            the authors' classifiers.
    """

    def __init__(self, batch_former: T, init: str) -> None:
        super().__init__()
        self.batch_former: T = batch_former
        if init not in INITS:
            raise InputError(f"init must be one of {', '.join(INITS)}; got '{init}'")
        if init == "pytorch":
            for mixer in batch_former.modules():
                if isinstance(mixer, BatchFormerLayer):
                    mixer.initialize_as_pytorch()

    @property
    def num_streams(self) -> int:
        """Number of streams that the model returns in its present mode."""
        return self.batch_former.num_streams

    def join(self, host: nn.Module, hooks: Iterable[RemovableHandle]) -> None:
        """Add the plug-in to ``host``; InputError if that has another batch attention, which also forks the batch."""
        for other in getattr(host, PLUGINS, {}).values():
            if isinstance(other, BatchAttention) and other.name != self.name:
                raise InputError(
                    f"the model already has {other.name}, and both would fork the batch: call its remove() first"
                )
        super().join(host, hooks)


class BatchFormerV2Plugin(BatchAttention[BatchFormerV2]):
    """BatchFormerV2 before or after the chosen blocks."""

    name = "batchformer_v2"

    def attach(self, vit: VisionTransformer) -> None:
        """Register the hooks on the chosen blocks."""
        self.join(vit, self._hooks(vit))
        vars(vit)["forward_intermediates"] = self._forward_intermediates  # also called by get_intermediate_layers

    def remove(self) -> None:
        """Restore the model without this plug-in; InputError if it was already removed."""
        for host in self._host:
            del vars(host)["forward_intermediates"]
        super().remove()

    def _forward_intermediates(self, *args: Any, **kwargs: Any) -> Any:
        """timm's method for a single stream: it expects one row per image after every block.

        Raises:
            InputError: the model is in training mode with two streams.
        """
        if self.num_streams > 1:
            raise InputError(
                "in training BatchFormerV2 doubles the batch between blocks, so forward_intermediates and "
                "get_intermediate_layers would mix two streams: call model.plugins['batchformer_v2'].eval() first for "
                "the features of the images alone, or forward_features for both streams of the last block"
            )
        host = cast("VisionTransformer", self._host[0])
        return type(host).forward_intermediates(host, *args, **kwargs)

    def _hooks(self, vit: Any) -> Iterator[RemovableHandle]:
        for layer in self.batch_former.insertions:
            if self.batch_former.position == "before":
                yield vit.blocks[layer].register_forward_pre_hook(partial(self._before, layer), with_kwargs=True)
            else:
                yield vit.blocks[layer].register_forward_hook(partial(self._after, layer), with_kwargs=True)

    def _before(self, layer: int, block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        self._check_mask(*args[1:], **kwargs)
        mixed = self._mix(layer, args[0])
        return None if mixed is args[0] else ((mixed, *args[1:]), kwargs)

    def _after(self, layer: int, block: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        self._check_mask(*args[1:], **kwargs)
        return self._mix(layer, output)

    def _check_mask(self, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> None:
        """Check that all images share the attention mask, because later blocks get the same mask for both streams."""
        if self.num_streams > 1 and attn_mask is not None and attn_mask.dim() > 2 and len(attn_mask) > 1:
            raise InputError(
                f"BatchFormerV2 doubles the batch between blocks, and attn_mask of shape {tuple(attn_mask.shape)} has "
                "rows of its own for each image: give one that all images share, of shape (tokens, tokens) or "
                "(1, 1, tokens, tokens)"
            )

    def _mix(self, layer: int, tokens: Tensor) -> Tensor:
        """Apply an insertion; the first one gets one stream and forks, later ones get the streams it returned."""
        streams = 1 if layer == self.batch_former.insertions[0] else self.num_streams
        batch = TokenBatch(tokens, num_streams=streams)
        return self.batch_former(batch, layer=layer, position=self.batch_former.position).tokens


def add_batchformer_v2(
    model: nn.Module,
    layers: Sequence[int] | str = (IMAGENET_LAYER,),
    *,
    position: str = "before",
    shared: bool = True,
    mode: str = "two_stream",
    num_layers: int = 1,
    heads: int | None = None,
    dropout: float = 0.5,
    gather: bool = False,
    init: str = "xavier",
    log_attention: bool = False,
) -> BatchFormerV2Plugin:
    """Add BatchFormerV2 to a timm ViT or DeiT, class token included; evaluation does not change.

    In training the model returns logits (2B, K), clean stream first: see :func:`num_streams` and
    :class:`detr_bf.batchformer.StreamLoss`. ``forward_features`` then returns tokens (2B, S, C), which ``forward_head``
    accepts; ``forward_intermediates`` raises an error. An ``attn_mask`` must then be shared by all images.

    Args:
        model: the bare model.
        layers: block indices from 0; the default is for ImageNet, ``all`` is for CIFAR-100 and long tails.
        heads: None: as many as the model has.
        position, shared, mode, num_layers, dropout, gather, log_attention: see :class:`BatchFormerV2`.
        init: see :class:`BatchAttention`.

    Raises:
        InputError: the model is unsupported or already has batch attention, layers do not exist, or the position, the
            mode or the initialisation is unknown.
    """
    vit = require_vit(model)
    where = chosen(layers, len(vit.blocks))
    plugin = BatchFormerV2Plugin(
        BatchFormerV2(
            vit.embed_dim,
            layers=where,
            num_encoder_layers=len(vit.blocks),
            position=position,
            shared=shared,
            mode=mode,
            num_layers=num_layers,
            heads=cast("Any", vit.blocks[0].attn).num_heads if heads is None else heads,
            dropout=dropout,
            gather=gather,
            log_attention=log_attention,
        ),
        init,
    )
    plugin.attach(vit)
    return plugin


class BatchFormerPlugin(BatchAttention[BatchFormer]):
    """One BatchFormer before one or several modules that read pooled features."""

    name = "batchformer"

    def before(self, reader: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (self.batch_former(args[0]), *args[1:]) if self.training else None


def add_batchformer(
    model: nn.Module,
    *,
    before: Sequence[str] | None = None,
    dim: int | None = None,
    heads: int = 4,
    dropout: float = 0.5,
    num_layers: int = 1,
    shared_classifier: bool = True,
    gather: bool = False,
    init: str = "xavier",
) -> BatchFormerPlugin:
    """Add BatchFormer before the classifier of a timm or torchvision model; evaluation does not change.

    In training the model returns logits (2B, K), clean stream first: see :func:`num_streams` and
    :class:`detr_bf.batchformer.StreamLoss`. ``before`` also covers two other uses of the paper:

    - RIDE, one BatchFormer for three experts: the experts' classifiers, with ``shared_classifier=False``; they are the
      classifiers of :class:`detr_bf.classification.experts.ExpertResNet`;
    - MoCo-v3, ``before=("base_encoder.head", "momentum_encoder.head")``, both projectors and not the predictor, with
      :func:`detr_bf.batchformer.contrast_streams`.

    Args:
        before: names of the modules in ``model`` that read the features; None: its classifiers.
        dim: channels of the features; None: the input channels of these modules' first linear layer.
        heads, dropout, num_layers, shared_classifier, gather: see :class:`BatchFormer`.
        init: see :class:`BatchAttention`.

    Raises:
        InputError: there are no such modules, features have several widths, the initialisation is unknown, or the model
            has auxiliary classifiers or already batch attention.
    """
    readers = classifiers_of(model) if before is None else [_named(model, name) for name in before]
    if dim is None:
        dim = _common_width(readers)
    plugin = BatchFormerPlugin(
        BatchFormer(
            dim,
            heads=heads,
            dropout=dropout,
            num_layers=num_layers,
            shared_classifier=shared_classifier,
            gather=gather,
        ),
        init,
    )
    plugin.join(model, (reader.register_forward_pre_hook(plugin.before) for reader in readers))
    return plugin


def num_streams(model: nn.Module) -> int:
    """Return the number of streams of ``model`` in its present mode; it may be wrapped or compiled."""
    plugins = (module for module in model.modules() if isinstance(module, BatchAttention))
    return next((plugin.num_streams for plugin in plugins), 1)


def classifiers_of(model: Any) -> Sequence[nn.Module]:
    """Return the linear layers that compute a timm or torchvision model's logits."""
    if getattr(model, "aux_logits", False):
        raise InputError("auxiliary classifiers would get one stream only: build the model with aux_logits=False")
    if hasattr(model, "get_classifier"):  # timm
        found = model.get_classifier()
        heads = list(found) if isinstance(found, tuple) else [found]
    else:  # torchvision
        heads = [getattr(model, name) for name in ("fc", "classifier", "head", "heads") if hasattr(model, name)][:1]
    linear = [layer for head in heads for layer in [m for m in head.modules() if isinstance(m, nn.Linear)][-1:]]
    if not linear:
        raise InputError(
            f"no linear classifier found in {type(model).__name__}: name the module that reads the pooled features, "
            "as in before=('classifier',)"
        )
    return linear


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"before: {type(model).__name__} has no module '{name}'; named_modules() lists them all"
        ) from error


def _common_width(readers: Sequence[nn.Module]) -> int:
    """Return the input channels of the modules, which must be equal."""
    widths = {
        next((layer.in_features for layer in reader.modules() if isinstance(layer, nn.Linear)), 0) for reader in readers
    }
    if len(widths) != 1 or 0 in widths:
        raise InputError(
            f"the modules' first linear layers read {sorted(widths)} channels (0: no linear layer), and one "
            "BatchFormer serves one width: give dim, or other modules"
        )
    return widths.pop()
