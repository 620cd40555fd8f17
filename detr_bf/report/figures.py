"""Common style of matplotlib figures: white background, few lines, colours for colour-blind readers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from detr_bf.errors import InputError
from detr_bf.files import atomic_write
from detr_bf.report.fonts import add_fallback_fonts

INK, FAINT = "#3a3f46", "#d9dce1"
# Okabe and Ito, "Color Universal Design" (2008)
BLACK, BLUE, ORANGE, GREEN, PINK = "#1c1e22", "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION = "#56b4e9", "#d55e00"
FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(output: str | Path, what: str) -> None:
    """Check the suffix of a figure's file; the message begins with ``what``, for example ``curves are``.

    Raises:
        InputError: the suffix is not one of ``FIGURE_SUFFIXES``.
    """
    if Path(output).suffix not in FIGURE_SUFFIXES:
        raise InputError(f"{what} written as .svg, .png or .pdf; got '{output}'")


def save_figure(output: str | Path, figure: Figure, dpi: int = 150) -> None:
    """Atomically write a figure; the suffix, already checked, chooses the format.

    Text from outside must have passed :func:`~detr_bf.report.fonts.plain`.
    """
    add_fallback_fonts(figure)
    with atomic_write(output) as temporary:
        figure.savefig(temporary, format=Path(output).suffix[1:], dpi=dpi)


def title(axes: Axes, text: str) -> None:
    """Set a bold title above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=INK)


def clear_lines(axes: Axes, sides: tuple[str, ...] = ("bottom",)) -> None:
    """Remove tick marks and the frame, except for faint lines at the given ``sides``."""
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(FAINT)
