"""How spread out attention is, block by block (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457, figures 4 and 7).

Shape legend: R images, H heads, S tokens with the class token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.classification.analysis.attention import measure_attention
from detr_bf.classification.analysis.layers import LayerCurve, draw_layers
from detr_bf.labelled import LabelledImages


def entropy(attention: Tensor) -> Tensor:
    """(R, H, S, S) -> (R, H, S): -sum over j of a_ij ln a_ij, from 0 to ln S; 0 ln 0 is 0."""
    return torch.special.entr(attention).sum(-1)


def attention_entropy(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """The entropy of a timm ViT's attention: mean and percentiles over images, heads and query tokens.

    The class token takes part, as query and as key, so that the bound is ln S.

    Raises:
        InputError: another model, or no images.
    """
    tokens = 0

    def measure(attention: Tensor, grid: tuple[int, int]) -> Tensor:
        nonlocal tokens
        tokens = attention.shape[-1]
        return entropy(attention)

    values = measure_attention(model, batches, measure)
    return LayerCurve.of(values, bound=math.log(tokens))


def draw_attention_entropy(runs: Mapping[str, LayerCurve]) -> Figure:
    """One line a run, and the bound."""
    return draw_layers(runs, title="Entropy of attention", ylabel="entropy, nats")
