"""Description of every setting, read from the fields of the config classes and the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One key of a config, all as text."""

    key: str
    type: str
    default: str
    allowed: str
    comment: str


def described_settings(schema: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a config dataclass and of the groups in it."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from described_settings(typing.cast("type[Any]", kind), f"{key}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        choices, rule = field.metadata.get("choices"), field.metadata.get("rule")
        allowed = ", ".join(choices) if choices else rule.wanted if rule else ""
        if field.metadata.get("path"):
            allowed = "a local path"
        declared, comment = _declaration(schema, field.name)
        yield Setting(key, declared, _as_yaml(default), allowed, comment)


def _declaration(schema: type[Any], name: str) -> tuple[str, str]:
    """Return the annotation and the trailing comment of a field, from the class that declares it last."""
    for owner in schema.__mro__:
        if name in (declared := _fields(owner)):
            return declared[name]
    raise AssertionError(f"{schema.__name__} has no field {name}")


@cache
def _fields(owner: type[Any]) -> dict[str, tuple[str, str]]:
    if not dataclasses.is_dataclass(owner):
        return {}
    source = inspect.cleandoc("\n" + inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (definition,) = ast.parse(source).body
    return {
        node.target.id: (ast.unparse(node.annotation), comments.get(node.end_lineno or 0, ""))
        for node in typing.cast(ast.ClassDef, definition).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _as_yaml(value: Any) -> str:
    """Return a default as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value) if value != "" else '""'
