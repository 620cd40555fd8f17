"""Markdown tables of the settings: key, type, default, allowed values and the comment beside the field."""

from __future__ import annotations

from typing import Any

from detr_bf.config.described import Setting, described_settings


def markdown(schema: type[Any]) -> str:
    """Return one section with a table for each group of settings; the settings outside of groups come first."""
    groups: dict[str, list[Setting]] = {}
    for setting in sorted(described_settings(schema), key=lambda setting: setting.key.count(".") > 0):
        groups.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return "\n".join(
        f"### {group or 'top level'}\n\n"
        "| setting | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
        + "".join(
            "| "
            + " | ".join(
                [
                    f"`{each.key}`",
                    _code(each.type),
                    _code(each.default),
                    _plain(each.allowed),
                    _plain(each.comment),
                ]
            )
            + " |\n"
            for each in members
        )
        for group, members in groups.items()
    )


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _plain(text: str) -> str:
    return text.translate({ord(each): f"\\{each}" for each in "|<>*_[]"})
