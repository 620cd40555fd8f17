"""Settings: typed dataclasses, YAML files that inherit, ``key=value`` overrides."""

from detr_bf.config.common import RunConfig
from detr_bf.config.detection import DetectionConfig
from detr_bf.config.loader import (
    SCHEMAS,
    config_from_dict,
    config_to_dict,
    config_to_yaml,
    flatten_settings,
    known_keys,
    load_config,
    own_settings,
    packaged_configs,
    packaged_experiments,
    parse_override,
    saved_config,
    schema_of,
    yaml_mapping,
)

__all__ = [
    "SCHEMAS",
    "DetectionConfig",
    "RunConfig",
    "config_from_dict",
    "config_to_dict",
    "config_to_yaml",
    "flatten_settings",
    "known_keys",
    "load_config",
    "own_settings",
    "packaged_configs",
    "packaged_experiments",
    "parse_override",
    "saved_config",
    "schema_of",
    "yaml_mapping",
]
