"""Variants compared with their baseline, checked with numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from PIL import Image

from detr_bf.errors import InputError
from detr_bf.report.comparison import Interval, compare_variants, comparison_table, save_comparison

THREE_SEEDS = {"plain": [70.0, 72.0, 74.0], "ours": [71.0, 74.0, 77.0]}
T_2, T_4 = 4.302652730, 2.776445105  # 97.5 % quantiles of Student's t with 2 and 4 degrees of freedom, from a table


def test_mean_and_interval_by_hand() -> None:
    """Scores 70, 72, 74: mean 72, standard deviation 2."""
    interval = Interval.of(THREE_SEEDS["plain"])
    assert interval.mean == 72
    assert interval.half_width == pytest.approx(T_2 * 2 / math.sqrt(3), rel=1e-8)


def test_differences_are_taken_seed_by_seed() -> None:
    """Differences of 1, 2 and 3: mean 2, deviation 1; the two means alone are known to +-5 and +-7."""
    plain, ours = compare_variants(THREE_SEEDS, "plain")
    assert plain.difference is None
    assert ours.difference is not None
    assert ours.difference.mean == 2
    assert ours.difference.half_width == pytest.approx(T_2 / math.sqrt(3), rel=1e-8)
    assert not ours.difference.excludes_zero, "2 +- 2.48 includes 0"
    five = compare_variants({"plain": [0.0] * 5, "ours": [1.0, 2.0, 3.0, 2.0, 2.0]}, "plain")[1].difference
    assert five is not None
    assert five.half_width == pytest.approx(T_4 * math.sqrt(0.5 / 5), rel=1e-8)
    assert five.excludes_zero


def test_a_lower_confidence_has_a_narrower_interval() -> None:
    narrow = compare_variants(THREE_SEEDS, "plain", confidence=0.8)[1].mean
    assert narrow.half_width == pytest.approx(1.885618083 * 3 / math.sqrt(3), rel=1e-8)


def test_of_one_seed_there_is_a_mean_alone() -> None:
    plain, ours = compare_variants({"plain": [70.0], "ours": [71.5]}, "plain")
    assert plain.mean == Interval(70.0, None)
    assert ours.difference == Interval(1.5, None)
    assert not ours.difference.excludes_zero
    assert comparison_table((plain, ours), "top-1").splitlines()[3] == "| ours | 71.5 | +1.5 | 1 |"


def test_the_table_is_bold_where_chance_does_not_explain_the_difference() -> None:
    values = {"plain": [70.0, 72.0, 74.0], "a|b": [75.0, 77.1, 79.2], "worse": [69.0, 69.0, 74.0]}
    assert comparison_table(compare_variants(values, "plain"), "top-1 (%)", digits=2) == (
        "| Variant | top-1 (%) | Difference, paired | Seeds |\n"
        "|:--|--:|--:|--:|\n"
        "| plain | 72.00 ± 4.97 | — | 3 |\n"
        "| a\\|b | 77.10 ± 5.22 | **+5.10 ± 0.25** | 3 |\n"
        "| worse | 70.67 ± 7.17 | -1.33 ± 3.79 | 3 |\n"
    )


def test_the_picture_has_a_line_for_every_variant(tmp_path: Path) -> None:
    sizes = []
    for count in (2, 4):
        values = {f"variant {number}": [1.0 + number, 2.0, 4.0] for number in range(count)}
        save_comparison(tmp_path / "c.png", compare_variants(values, "variant 0"), "top-1 (%)")
        with Image.open(tmp_path / "c.png") as picture:
            sizes.append(picture.size)
    assert sizes[1][0] == sizes[0][0]
    assert sizes[1][1] > 1.2 * sizes[0][1]
    save_comparison(tmp_path / "one.svg", compare_variants({"only": [3.0]}, "only"), "top-1 (%)")
    svg = (tmp_path / "one.svg").read_text()
    assert "<svg" in svg
    with pytest.raises(InputError, match=r"comparisons are written as \.svg"):
        save_comparison(tmp_path / "c.bmp", compare_variants(THREE_SEEDS, "plain"), "top-1")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ours": [1.0]}, "baseline must be one of the variants ours; got 'plain'"),
        ({"plain": [1.0, 2.0], "ours": [1.0]}, "'ours' has 1 values and the baseline 2"),
        ({"plain": []}, "'plain' has 0 values"),
        ({"plain": [1.0], "ours": [math.nan]}, "'ours' holds a value that is not finite"),
    ],
)
def test_bad_input_is_told(values: dict[str, list[float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare_variants(values, "plain")


def test_confidence_must_be_a_share() -> None:
    with pytest.raises(InputError, match="between 0 and 1, got 95"):
        compare_variants(THREE_SEEDS, "plain", confidence=95)
