"""Base of the plug-ins: a child module of the model, removable hooks, and the blocks they are registered on.

A plug-in is a module under ``model.plugins``. Its tensors are in the model's state dict with the prefix ``plugins``, so
that optimisers, averages of weights and checkpoints include them; the other keys do not change. Hooks are bound methods
of the plug-in, so that a deep copy of the model has hooks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

from timm.models.mlp_mixer import MlpMixer
from timm.models.pit import PoolingVisionTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer import check_layers
from detr_bf.common.errors import InputError
from detr_bf.common.weights import PLUGINS
from detr_bf.transformer import Encoder


def keep_own_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keep training-only plug-ins unchanged when loading a state dict without plug-ins (a load_state_dict pre-hook).

    Missing tensors of plug-ins that change evaluation are still reported by a strict load.
    """
    if any(key.startswith(prefix) for key in state):
        return
    for name, plugin in module.named_children():
        if not plugin.in_evaluation:
            state.update(plugin.state_dict(prefix=f"{prefix}{name}."))


class Plugin(nn.Module):
    """Base class of plug-ins. Features kept from a forward pass are not copied with the model."""

    name: ClassVar[str]
    in_evaluation: ClassVar[bool] = False  # it changes the outputs of the model in evaluation

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self._host: tuple[nn.Module, ...] = ()  # in a tuple, because an attribute would register it as a child
        self._kept: dict[str, Any] = {}

    def join(self, host: nn.Module, hooks: Iterable[RemovableHandle]) -> None:
        """Add the plug-in to ``host``, with its device, dtype and mode; ``hooks`` are registered by iterating.

        Raises:
            InputError: the model already has this plug-in, or is an ``nn.Sequential``, which calls all its children.
        """
        if isinstance(host, nn.Sequential):
            raise InputError(
                f"a plug-in becomes a child of the model, and a {type(host).__name__} would call it like a layer: put "
                "the layers into a module with its own forward"
            )
        plugins = getattr(host, PLUGINS, None)
        if plugins is None:
            plugins = nn.ModuleDict()
            plugins.register_load_state_dict_pre_hook(keep_own_values)
        assert isinstance(plugins, nn.ModuleDict), f"the model uses the name {PLUGINS} itself"
        if self.name in plugins:
            raise InputError(f"the model has a plug-in {self.name} already: call its remove() first")
        reference = next(host.parameters())
        tensors = (*self.parameters(), *self.buffers())
        types = {(own.device, own.dtype if own.is_floating_point() else reference.dtype) for own in tensors}
        if types - {(reference.device, reference.dtype)}:
            self.to(device=reference.device, dtype=reference.dtype)  # not possible for meta tensors
        self.train(host.training)
        plugins[self.name] = self
        host.add_module(PLUGINS, plugins)
        self._host = (host,)
        self._handles = list(hooks)

    def remove(self) -> None:
        """Restore the model without this plug-in.

        Raises:
            InputError: the plug-in was already removed.
        """
        if not self._host:
            raise InputError(f"the plug-in {self.name} belongs to no model: it was already removed")
        for handle in self._handles:
            handle.remove()
        plugins = getattr(self._host[0], PLUGINS)
        del plugins[self.name]
        if not plugins:
            delattr(self._host[0], PLUGINS)
        self._handles, self._host, self._kept = [], (), {}

    def _take(self, key: str) -> Any:
        """Return and forget features of the last forward pass in training."""
        if key not in self._kept:
            raise InputError(
                f"{self.name}: no features were kept. Call the model in training mode before each call of the loss"
            )
        return self._kept.pop(key)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}


def chosen(layers: Sequence[int] | str, depth: int) -> tuple[int, ...]:
    """Return the indices of blocks for ``all``, ``upper`` (the upper half) or a list of indices from 0.

    Raises:
        InputError: ``layers`` is another word, or a list that is empty, not ascending or outside the ``depth`` blocks.
    """
    if isinstance(layers, str):
        starts = {"all": 0, "upper": depth // 2}
        if layers not in starts:
            raise InputError(f"layers='{layers}': give 'all', 'upper' or a list of indices from 0 to {depth - 1}")
        return tuple(range(starts[layers], depth))
    check_layers(layers, depth, of="the model has {} blocks")
    return tuple(layers)


def parts_of_blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return of every block the child that has one of ``names``, with outputs (R, S, C).

    Raises:
        InputError: the model is of an unsupported class, or a block has no such child.
    """
    if isinstance(model, VisionTransformer | MlpMixer):
        blocks = list(model.blocks)
    elif isinstance(model, PoolingVisionTransformer):
        blocks = [block for stage in model.transformers for block in cast("nn.Sequential", stage.blocks)]
    elif isinstance(model, Encoder):
        blocks = list(model.layers)
    else:
        raise refused(model, "VisionTransformer (ViT, DeiT), PoolingVisionTransformer or MlpMixer", "Encoder")
    found = [next((getattr(block, name) for name in names if hasattr(block, name)), None) for block in blocks]
    parts = [part for part in found if part is not None]
    if len(parts) < len(blocks):
        raise InputError(
            f"{type(model).__name__}: its blocks ({type(blocks[0]).__name__}) have none of {', '.join(names)}; "
            "build the model with timm's ordinary Block"
        )
    return parts


def require_vit(model: nn.Module) -> VisionTransformer:
    """Return ``model`` if it is a timm VisionTransformer without random patch dropping.

    Raises:
        InputError: it is another model, or drops patches.
    """
    if not isinstance(model, VisionTransformer):
        raise refused(model, "VisionTransformer (ViT, DeiT)")
    if not isinstance(model.patch_drop, nn.Identity):
        raise InputError(
            "the model drops random patches of each image, so the index of a token is not its position: build it with "
            "patch_drop_rate=0"
        )
    return model


def refused(model: nn.Module, timm_models: str, ours: str = "") -> InputError:
    """Create the error for a model that a plug-in does not support."""
    own = f" or detr_bf.transformer.{ours}" if ours else ""
    return InputError(
        f"got a {type(model).__name__}, expected timm's {timm_models}{own}: "
        "give the bare model, not wrapped or compiled"
    )


def patches_of(tokens: Tensor, prefix_tokens: int) -> Tensor:
    """(R, S, C) -> (R, P, C): remove class, distillation and register tokens."""
    return tokens[:, prefix_tokens:]
