"""Settings: typed dataclasses, YAML files that inherit, ``key=value`` overrides."""

from detr_bf.config.classification import ClassifierConfig, MaskedConfig
from detr_bf.config.detection import DetectionConfig
from detr_bf.config.loader import (
    config_from_dict,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
    saved_config,
    schema_of,
)
from detr_bf.config.run import RunConfig

__all__ = [
    "ClassifierConfig",
    "DetectionConfig",
    "MaskedConfig",
    "RunConfig",
    "config_from_dict",
    "config_to_dict",
    "config_to_yaml",
    "known_keys",
    "load_config",
    "saved_config",
    "schema_of",
]
