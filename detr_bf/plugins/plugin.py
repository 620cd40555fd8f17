"""What the plug-ins share: a place in the model, hooks that can be taken away again, the blocks they hang on.

A plug-in is a module under ``model.plugins``. Its tensors are in the model's state dict with that one prefix before
them, so optimisers, averages of weights and checkpoints know them; all other keys stay those of the model alone. Hooks
are bound methods of the plug-in, so that a deep copy of the model has hooks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

from timm.models.mlp_mixer import MlpMixer
from timm.models.pit import PoolingVisionTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer import check_layers
from detr_bf.errors import InputError
from detr_bf.transformer import Encoder

PREFIX = "plugins"

T = TypeVar("T")


def without_plugins(state: Mapping[str, T]) -> dict[str, T]:
    """A state dict as the model without plug-ins has it: what is deployed."""
    return {key: value for key, value in state.items() if PREFIX not in key.split(".")}


def keep_own_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: a state dict that holds no plug-in at all leaves those that only training uses as they are.

    What a plug-in adds to the network in evaluation is missing, and a strict load says so.
    """
    if any(key.startswith(prefix) for key in state):
        return
    for name, plugin in module.named_children():
        if not plugin.in_evaluation:
            state.update(plugin.state_dict(prefix=f"{prefix}{name}."))


class Plugins(nn.ModuleDict):
    """The plug-ins of one model, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(keep_own_values)


class Plugin(nn.Module):
    """Base of all plug-ins. What was kept of a forward pass is not copied with the model."""

    name: ClassVar[str]
    in_evaluation: ClassVar[bool] = False  # the model's outputs in evaluation are others with it

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self._host: tuple[nn.Module, ...] = ()  # in a tuple, because an attribute would make it a child
        self._kept: dict[str, Any] = {}

    def join(self, host: nn.Module, hooks: Iterable[RemovableHandle]) -> None:
        """Become a part of ``host``, on its device and in its dtype and mode; ``hooks`` are registered by iterating.

        Raises:
            InputError: the model has one already, or calls all its children one after another.
        """
        if isinstance(host, nn.Sequential):
            raise InputError(
                f"a plug-in becomes a child of the model, and a {type(host).__name__} would call it like a layer: put "
                "the layers into a module with a forward of its own"
            )
        plugins = getattr(host, PREFIX, None) or Plugins()
        assert isinstance(plugins, Plugins), f"the model uses the name {PREFIX} itself"
        if self.name in plugins:
            raise InputError(f"the model has a plug-in {self.name} already: call its remove() first")
        reference = next(host.parameters())
        types = {(own.device, own.dtype if own.is_floating_point() else reference.dtype) for own in self._tensors()}
        if types - {(reference.device, reference.dtype)}:
            self.to(device=reference.device, dtype=reference.dtype)  # which tensors without numbers cannot
        self.train(host.training)
        plugins[self.name] = self
        host.add_module(PREFIX, plugins)
        self._host = (host,)
        self._handles = list(hooks)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.parameters()
        yield from self.buffers()

    def remove(self) -> None:
        """Leave the model as it was.

        Raises:
            InputError: it is removed already.
        """
        if not self._host:
            raise InputError(f"the plug-in {self.name} belongs to no model: it was removed already")
        for handle in self._handles:
            handle.remove()
        plugins = getattr(self._host[0], PREFIX)
        del plugins[self.name]
        if not plugins:
            delattr(self._host[0], PREFIX)
        self._handles, self._host, self._kept = [], (), {}

    def _take(self, what: str) -> Any:
        """What the last forward pass in training left."""
        if what not in self._kept:
            raise InputError(
                f"{self.name}: no features to work on. Call the model in training mode before each call of the loss"
            )
        return self._kept.pop(what)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}


def chosen(layers: Sequence[int] | str, depth: int) -> tuple[int, ...]:
    """Indices of blocks counted from 0, from ``all``, ``upper`` (the upper half) or a list.

    Raises:
        InputError: another word, or a list that is empty, leaves the ``depth`` blocks or does not ascend.
    """
    if isinstance(layers, str):
        starts = {"all": 0, "upper": depth // 2}
        if layers not in starts:
            raise InputError(f"layers='{layers}': give 'all', 'upper' or a list of indices from 0 to {depth - 1}")
        return tuple(range(starts[layers], depth))
    check_layers(layers, depth, of="the model has {} blocks")
    return tuple(layers)


def feed_forwards(model: nn.Module) -> list[nn.Module]:
    """The networks that work on each token alone, one a block, whose output is (R, S, C).

    Raises:
        InputError: the model is none of those known, or its blocks have no such network.
    """
    if isinstance(model, VisionTransformer | MlpMixer):
        blocks = list(model.blocks)
    elif isinstance(model, PoolingVisionTransformer):
        blocks = [block for stage in model.transformers for block in cast("nn.Sequential", stage.blocks)]
    elif isinstance(model, Encoder):
        blocks = list(model.layers)
    else:
        raise refused(model, "VisionTransformer (ViT, DeiT), PoolingVisionTransformer or MlpMixer", "Encoder")
    names = ("mlp", "mlp_channels", "feed_forward")
    found = [next((getattr(block, name) for name in names if hasattr(block, name)), None) for block in blocks]
    networks = [network for network in found if network is not None]
    if len(networks) < len(blocks):
        raise InputError(
            f"{type(model).__name__}: its blocks ({type(blocks[0]).__name__}) have none of {', '.join(names)}; "
            "build the model with timm's ordinary Block"
        )
    return networks


def require_vit(model: nn.Module) -> VisionTransformer:
    """``model``, if it is a timm VisionTransformer whose images keep all their patches.

    Raises:
        InputError: it is not.
    """
    if not isinstance(model, VisionTransformer):
        raise refused(model, "VisionTransformer (ViT, DeiT)")
    if not isinstance(model.patch_drop, nn.Identity):
        raise InputError(
            "the model leaves patches out at random, other ones in each image, so a token's index does not say its "
            "place: build it with patch_drop_rate=0"
        )
    return model


def refused(model: nn.Module, timm_models: str, ours: str = "") -> InputError:
    """The error for a model that a plug-in does not know."""
    own = f" or detr_bf.transformer.{ours}" if ours else ""
    return InputError(
        f"got a {type(model).__name__}, expected timm's {timm_models}{own}: "
        "give the bare model, before it is wrapped or compiled"
    )


def patches_of(tokens: Tensor, prefix_tokens: int) -> Tensor:
    """(R, S, C) -> (R, P, C), without class, distillation and register tokens."""
    return tokens[:, prefix_tokens:]
