"""Options that a part declares beside itself, with the settings of the config that give their values."""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any


def setting(key: str, default: Any) -> Any:
    """Declare a field of a dataclass of options that the config sets with ``key``; null there means ``default``."""
    return field(default=default, metadata={"setting": key})


def settings_of(options: Any) -> list[str]:
    """Return the settings of the fields of a dataclass, and of the dataclasses that are their defaults."""
    found = []
    for each in fields(options):
        found += settings_of(each.default) if is_dataclass(each.default) else []
        found += [each.metadata["setting"]] if each.metadata else []
    return found


def chosen_options(options: Any, config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of options, by name, that the settings of ``config`` give."""
    values = {}
    for each in fields(options):
        if is_dataclass(each.default) and not isinstance(each.default, type):
            values[each.name] = replace(each.default, **chosen_options(each.default, config))
        elif each.metadata and (value := attrgetter(each.metadata["setting"])(config)) is not None:
            values[each.name] = value
    return values
