"""Foreign text, shown without effect on the terminal or the spreadsheet."""

from __future__ import annotations

import pytest

from detr_bf.common.text import counted, csv_cell, listed, printable, safe_message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat", "cat"),
        ("größe 猫 é", "größe 猫 é"),
        ("a\u200cb 👨\u200d👩 so\u00adft", "a\u200cb 👨\u200d👩 so\u00adft"),
        ("a\n0 errors, 0 warnings", r"a\n0 errors, 0 warnings"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\u202egpj.exe", r"a\u202egpj.exe"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
        ("\ud800", r"\ud800"),
        ("tab\there\r", r"tab\there\r"),
    ],
)
def test_a_name_is_one_harmless_line(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode("utf-8")  # a lone surrogate would be refused


def test_a_long_name_loses_its_middle() -> None:
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 100_000) == "x" * 99 + "…" + "x" * 100
    assert printable(f"/data/{'deep/' * 100}photo.jpg").endswith("deep/photo.jpg")
    for text in ("\x1b" * 100_000, "\x1b" * 15, "a\n" * 30):
        assert len(printable(text, limit=50)) == 50
        assert "\x1b" not in printable(text, limit=50)
        assert "\n" not in printable(text, limit=50)


def test_a_message_keeps_its_lines_and_its_length() -> None:
    assert safe_message("first\nsecond \x1b[2J\n" + "x" * 1000) == "first\nsecond \\x1b[2J\n" + "x" * 1000


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1"])
def test_a_cell_is_no_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert csv_cell(f"a{text}") == f"a{text}"


def test_listed_names_the_first_and_counts_the_others() -> None:
    assert listed([]) == ""
    assert listed(["a", "b\n"]) == "a, b\\n"
    assert listed(range(10), 3) == "0, 1, 2 and 7 more"
    assert listed(["a", "b", "c"], 2, separator="; ") == "a; b and 1 more"
    assert listed(iter(lambda: "a", None), 2, total=10**17) == f"a, a and {10**17 - 2} more", "one by one"


@pytest.mark.parametrize(("number", "text"), [(0, "0 boxes"), (1, "1 box"), (2, "2 boxes"), (1000, "1,000 boxes")])
def test_a_number_has_its_noun(number: int, text: str) -> None:
    assert counted(number, "box", "boxes") == text
    assert counted(1, "image") == "1 image"
    assert counted(2, "image") == "2 images"
