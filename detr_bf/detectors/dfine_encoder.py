"""Hybrid encoder of D-FINE (Peng et al. 2024, arXiv 2410.13842, section 4.3), with other convolutions than RT-DETR's.

Shape legend: B images, C channels, h x w cells of one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.detectors.detector import Options
from detr_bf.detectors.hybrid_encoder import CrossScaleFusion, FusionBlock, HybridEncoder, NormedConvolution
from detr_bf.detectors.parts import encoder_with_default_weights
from detr_bf.transformer.blocks import xavier


def dfine_encoder(
    options: Options,
    *,
    width: int,
    feedforward_dim: int,
    levels: int,
    expansion: float = 1.0,
    blocks: int = 3,
    attention_levels: Sequence[int] | None = None,
    as_released: bool = False,
) -> HybridEncoder:
    """Build the encoder from tokens of ``width`` channels to memory of ``options.hidden_dim`` channels.

    Args:
        width, feedforward_dim: widths in the encoder.
        expansion: width of the branches of a fusion block, in units of ``width / 2``.
        blocks: RepVGG blocks in each branch.
        attention_levels: indices of the levels with encoder layers, from the finest; None: the coarsest.
        as_released: see :func:`~detr_bf.detectors.hybrid_encoder.cell_position`.

    Raises:
        InputError: a width that is not divisible by 4, no channel in the branches, or levels of the attention that are
            not there or leave out the coarsest.
    """
    if width % 4:
        name = "hidden_dim" if width == options.hidden_dim else "encoder_dim"
        raise InputError(f"{name}={width} of the encoder must be divisible by 4 for the sine encoding")
    chosen = [levels - 1] if attention_levels is None else list(attention_levels)
    if chosen != sorted({*chosen} & {*range(levels)}) or levels - 1 not in chosen:
        raise InputError(
            f"attention_levels={chosen}: expected some of 0 to {levels - 1} in ascending order, the last too"
        )
    inner = replace(options, hidden_dim=width, feedforward_dim=feedforward_dim, activation="gelu")
    plain = replace(inner, batch_former=None)
    same_width = width == options.hidden_dim
    return HybridEncoder(
        encoder_with_default_weights(inner),
        CrossScaleFusion(
            levels,
            lateral=partial(NormedConvolution, width, width),
            down=partial(_down, width),
            fuse=partial(AggregationBlock, width, expansion=expansion, blocks=blocks),
        ),
        [nn.Identity() if same_width else xavier(NormedConvolution(width, options.hidden_dim)) for _ in range(levels)],
        finer={level: encoder_with_default_weights(plain) for level in chosen[:-1]},
        temperature=options.position_temperature,
        released_position=as_released,
    )


def _down(dim: int) -> nn.Sequential:
    """Build the layer that halves the resolution: 1 x 1 convolution, then 3 x 3 within each channel ("SCDown")."""
    return nn.Sequential(NormedConvolution(dim, dim), NormedConvolution(dim, dim, 3, 2, groups=dim))


class AggregationBlock(nn.Module):
    """Fusion of two maps that are concatenated ("RepNCSPELAN4"): (B, 2 C, h, w) -> (B, C, h, w).

    Half of the channels pass through two branches one after the other; the last convolution reads both halves and the
    result of each branch.

    Args:
        expansion: width of the branches in units of C / 2, rounded down.

    Raises:
        InputError: ``expansion`` leaves no channel.
    """

    def __init__(self, dim: int, *, expansion: float = 1.0, blocks: int = 3) -> None:
        super().__init__()
        hidden = round(expansion * dim // 2)
        if hidden < 1:
            raise InputError(f"expansion={expansion} of {dim} channels leaves none: give at least 2/{dim}")
        silu = nn.SiLU()
        self.enter = NormedConvolution(2 * dim, 2 * dim, activation=silu)
        self.first, self.second = (
            nn.Sequential(FusionBlock(width, hidden, blocks=blocks), NormedConvolution(hidden, hidden, 3, 1, silu))
            for width in (dim, hidden)
        )
        self.leave = NormedConvolution(2 * dim + 2 * hidden, dim, activation=silu)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        first = self.first(entered.chunk(2, dim=1)[1])
        return self.leave(torch.cat([entered, first, self.second(first)], dim=1))
