"""Range checks: every number of every schema has one."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, load_config
from detr_bf.config.common import ARGUMENTS, FRACTION, Rule
from detr_bf.segmentation.config import SegmentationConfig

SCHEMAS = (DetectionConfig, ClassifierConfig, MaskedConfig, ContrastiveConfig, SegmentationConfig)


def numeric(hint: Any) -> bool:
    """Return whether values of a type may be numbers: int, float, Optional, lists and dictionaries of them."""
    return hint in (int, float) or any(map(numeric, typing.get_args(hint))) or typing.get_origin(hint) is dict


def fields_of(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from fields_of(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint, field


def numeric_fields() -> list[Any]:
    return [
        pytest.param(schema, key, hint, field, id=f"{schema.__name__}.{key}")
        for schema in SCHEMAS
        for key, hint, field in fields_of(schema)
        if numeric(hint)
    ]


@pytest.mark.parametrize(("schema", "key", "hint", "field"), numeric_fields())
def test_every_number_has_a_range(schema: type[Any], key: str, hint: Any, field: dataclasses.Field[Any]) -> None:
    rule = field.metadata.get("rule")
    assert isinstance(rule, Rule), f"{key} of {schema.__name__} has no rule: see detr_bf/config/common.py"
    inner = next((each for each in typing.get_args(hint) if typing.get_origin(each)), hint)  # of list[int] | None
    wrap = {list: lambda value: [value], dict: lambda value: {"a": value}}.get(typing.get_origin(inner), lambda v: v)
    for value in (math.nan, math.inf, -math.inf, 1e40):
        assert not rule.holds(wrap(value)), f"{key} accepts {value}"
    if hint is not dict:
        assert not rule.holds(wrap(10**400)), f"{key} accepts a number of 400 digits"
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    assert default is None or rule.holds(default), f"the default of {key}"


def test_the_walk_sees_what_it_should() -> None:
    keys = {key for key, hint, _ in fields_of(DetectionConfig) if numeric(hint)}
    assert {"loss.focal_alpha", "train.max_steps", "data.transforms.short_sides", "batch_former.layers"} <= keys
    assert not {"output_dir", "train.compile", "loss.classification"} & keys
    assert numeric(typing.Optional[list[float]])  # noqa: UP045


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.options.depth=1000000", "model.options must be plain values .*depths of at most 100"),
        ("model.options.depths=[2,1000000]", "model.options must be"),
        ("model.options.embed_dim=.nan", "model.options must be"),
        ("model.options.embed_dim=10000000", "model.options must be"),
        ("data.transforms.mean=[nan,0,0]", "data.transforms.mean must be finite numbers"),
        ("data.transforms.size=1000000", "data.transforms.size must be greater than 0 and at most 16384"),
        ("optimizer.betas=[nan,0.9]", "optimizer.betas must be finite numbers"),
        ("plugins.batchformer.dropout=1", "plugins.batchformer.dropout must be .*less than 1"),
        ("optimizer.momentum=1", "optimizer.momentum must be .*less than 1"),
        ("data.mix.mixup=-1", "data.mix.mixup must be 0 or more"),
        ("plugins.diverse_patch.cosine=inf", "plugins.diverse_patch.cosine must be 0 or more"),
        ("plugins.diverse_patch={enabled: true, patch_cutmix: false}", "set plugins.diverse_patch.mixing=0 or"),
        ("data.subset_seed=-1", "data.subset_seed must be at least 0"),
    ],
)
def test_nonsense_for_a_classifier_is_refused(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, [override], task="classification")


def test_arguments_of_other_libraries_may_be_any_plain_values() -> None:
    assert ARGUMENTS.holds({"img_size": [32, 64], "act_layer": "gelu", "qkv_bias": False, "depth": 12, "a": None})
    assert not FRACTION.holds(1.01)


def test_losses_of_masks_count_only_with_masks() -> None:
    boxes = ["loss.class_weight=0", "loss.bbox_weight=0", "loss.giou_weight=0"]
    load_config(None, [*boxes, "model.masks=true"])
    with pytest.raises(InputError, match="dice_weight are all 0"):
        load_config(None, [*boxes, "model.masks=true", "loss.mask_weight=0", "loss.dice_weight=0"])
