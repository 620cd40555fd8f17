"""Checks, then the implementation: today the plain PyTorch one."""

from __future__ import annotations

from torch import Tensor

from detr_bf.ops.reference import Shapes, ms_deform_attn_reference


def ms_deform_attn(
    value: Tensor, spatial_shapes: Shapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Sample feature maps at given places and add up what was found (Zhu et al. 2021, arXiv 2010.04159, equation 3).

    Args:
        value: (R, S, H, D), the cells of all levels one after another, S = sum of height x width.
        spatial_shapes: (height, width) of every level.
        sampling_locations: (R, Q, H, L, P, 2), x and y in [0, 1] over the whole (padded) level; outside is zero.
        attention_weights: (R, Q, H, L, P); they are not normalised here.

    Returns:
        (R, Q, H x D): bilinear samples, weighted and summed over levels and points.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check(value, spatial_shapes, sampling_locations, attention_weights)
    return ms_deform_attn_reference(value, spatial_shapes, sampling_locations, attention_weights)


def _check(value: Tensor, spatial_shapes: Shapes, sampling_locations: Tensor, attention_weights: Tensor) -> None:
    if value.dim() != 4 or sampling_locations.dim() != 6 or attention_weights.dim() != 5:
        raise ValueError(
            "expected value (R, S, H, D), sampling_locations (R, Q, H, L, P, 2) and attention_weights (R, Q, H, L, P); "
            f"got {tuple(value.shape)}, {tuple(sampling_locations.shape)} and {tuple(attention_weights.shape)}"
        )
    cells = sum(height * width for height, width in spatial_shapes)
    if value.shape[1] != cells:
        raise ValueError(f"value holds {value.shape[1]} cells, spatial_shapes {list(spatial_shapes)} mean {cells}")
    rows, _, heads, _ = value.shape
    queries, points = sampling_locations.shape[1], sampling_locations.shape[4]
    expected = (rows, queries, heads, len(spatial_shapes), points)
    if tuple(attention_weights.shape) != expected or tuple(sampling_locations.shape) != (*expected, 2):
        raise ValueError(
            f"for {len(spatial_shapes)} levels and value {tuple(value.shape)}, attention_weights must be {expected} "
            f"and sampling_locations {(*expected, 2)}; got {tuple(attention_weights.shape)} and "
            f"{tuple(sampling_locations.shape)}"
        )
