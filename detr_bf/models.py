"""Models by the names of the recipes in ``configs/``."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from detr_bf.assembly import build_model
from detr_bf.config import DetectionConfig, load_config
from detr_bf.detectors import Detector
from detr_bf.errors import InputError
from detr_bf.text import printable

NOT_MODELS = "base"  # folder of the configs that recipes inherit


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names that :func:`create_model` accepts and that match ``pattern`` (``"*_bfv2"``)."""
    return sorted(name for name in _recipes() if fnmatch.fnmatch(name, pattern))


def create_model(
    name: str, *, num_classes: int, pretrained_backbone: bool = False, overrides: Sequence[str] = ()
) -> Detector:
    """Build the detector of the recipe ``configs/*/NAME.yaml`` with new weights.

    Args:
        name: see :func:`list_models`.
        num_classes: classes of the data, without no-object.
        pretrained_backbone: load the backbone weights named in the recipe (ImageNet); they may be downloaded.
        overrides: ``key=value`` settings as on the command line, ``"model.num_queries=50"``.

    Raises:
        InputError: no such recipe, an unknown setting, a wrong number of classes, or the weights are not available.
    """
    return build_model(recipe_config(name, overrides), num_classes, pretrained=pretrained_backbone)


def recipe_config(name: str, overrides: Sequence[str] = ()) -> DetectionConfig:
    """Load the settings of the recipe ``configs/*/NAME.yaml``.

    Raises:
        InputError: no such recipe, or an unknown setting.
    """
    recipes = _recipes()
    if name not in recipes:
        shown = printable(name)
        near = difflib.get_close_matches(shown, recipes, n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise InputError(f"there is no model '{shown}'{hint}. detr_bf.list_models() lists all {len(recipes)}")
    config: DetectionConfig = load_config(recipes[name], list(overrides))
    return config


def _recipes() -> dict[str, Path]:
    """Return name -> file of all detection recipes; the recipes of other tasks lie one folder deeper."""
    folder = Path(str(resources.files("detr_bf.configs")))
    return {path.stem: path for path in folder.glob("*/*.yaml") if path.parent.name != NOT_MODELS}
