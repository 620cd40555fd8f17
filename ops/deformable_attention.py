"""Multi-scale deformable attention: checks, dispatch to kernel or reference, fake implementations, derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from detr_bf.ops import library
from detr_bf.ops.reference import Shapes, ms_deform_attn_reference


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Shapes | Tensor,
    level_start_index: Sequence[int] | Tensor | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Weighted sum of feature maps sampled at given locations (Zhu et al. 2021, arXiv 2010.04159, equation 3).

    Weights are cast to the dtype of ``value``; locations, their gradient and all sums are float32, or float64 if value
    is float64. Sampling is bilinear with cell centres at half-integers and zeros outside; a location that is not finite
    makes its result NaN.

    Args:
        value: (B, S, H, D), the cells of all levels; float64, float32, float16 or bfloat16. Must be finite: a corner
            outside a level may be read as a cell inside it with weight zero.
        spatial_shapes: (height, width) of every level. A tensor (L, 2) is copied to the host, which synchronises a GPU.
        level_start_index: first cell of every level, ascending; None: levels are contiguous.
        sampling_locations: (B, Q, H, L, P, 2), x and y in [0, 1] over the whole (padded) level.
        attention_weights: (B, Q, H, L, P), not normalised here.

    Returns:
        (B, Q, H x D) in the dtype of value: bilinear samples, weighted and summed over levels and points.

    Raises:
        ValueError: inconsistent shapes, devices or dtypes.
    """
    shapes = [(height, width) for height, width in _on_host(spatial_shapes)]  # symbols in torch.export
    cells = [height * width for height, width in shapes]
    starts = list(accumulate(cells[:-1], initial=0)) if level_start_index is None else _on_host(level_start_index)
    _check_tensors(value, sampling_locations, attention_weights, len(shapes))
    _check_levels(shapes, starts, value.shape[1])
    locations = sampling_locations.to(torch.promote_types(value.dtype, torch.float32))
    weights = attention_weights.to(value.dtype)
    if library.compiled(value.device):
        flat = [int(size) for shape in shapes for size in shape]
        return torch.ops.detr_bf.ms_deform_attn(value, flat, starts, locations, weights)
    return ms_deform_attn_reference(value, shapes, starts, locations, weights)


def _on_host(numbers: Any) -> Any:
    return numbers.tolist() if isinstance(numbers, Tensor) else numbers


def _check_tensors(value: Tensor, sampling_locations: Tensor, attention_weights: Tensor, levels: int) -> None:
    if value.dim() != 4 or sampling_locations.dim() != 6 or attention_weights.dim() != 5:
        raise ValueError(
            "expected value (B, S, H, D), sampling_locations (B, Q, H, L, P, 2) and attention_weights (B, Q, H, L, P); "
            f"got {tuple(value.shape)}, {tuple(sampling_locations.shape)} and {tuple(attention_weights.shape)}"
        )
    expected = (value.shape[0], sampling_locations.shape[1], value.shape[2], levels, sampling_locations.shape[4])
    if tuple(attention_weights.shape) != expected or tuple(sampling_locations.shape) != (*expected, 2):
        raise ValueError(
            f"for {levels} levels and value {tuple(value.shape)}, attention_weights must be {expected} "
            f"and sampling_locations {(*expected, 2)}; got {tuple(attention_weights.shape)} and "
            f"{tuple(sampling_locations.shape)}"
        )
    tensors = {"value": value, "sampling_locations": sampling_locations, "attention_weights": attention_weights}
    if any(not tensor.is_floating_point() for tensor in tensors.values()):
        raise ValueError(f"expected floating-point tensors, got {library.describe(tensors, 'dtype')}")
    if len({tensor.device for tensor in tensors.values()}) > 1:
        raise ValueError(f"expected tensors on one device, got {library.describe(tensors, 'device')}")


def _check_levels(shapes: Shapes, starts: Sequence[int], cells: int) -> None:
    if len(starts) != len(shapes):
        raise ValueError(f"level_start_index has {len(starts)} entries, spatial_shapes {len(shapes)} levels")
    end = 0
    for (height, width), start in zip(shapes, starts, strict=True):
        if height < 1 or width < 1:
            raise ValueError(f"spatial_shapes {list(shapes)}: every height and width must be 1 or more")
        if start < end:
            raise ValueError(f"level_start_index {list(starts)} does not ascend past levels of {list(shapes)}")
        end = start + height * width
    if end > cells:
        raise ValueError(f"value holds {cells} cells, spatial_shapes {list(shapes)} reach to cell {end}")


# ---- fake implementations and derivatives of the compiled operators ----


def _shape_of_result(
    value: Tensor, spatial_shapes: list[int], level_start_index: list[int], locations: Tensor, weights: Tensor
) -> Tensor:
    _check_tensors(value, locations, weights, len(level_start_index))
    return value.new_empty(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])


def _shapes_of_gradients(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: list[int],
    level_start_index: list[int],
    locations: Tensor,
    weights: Tensor,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    library.check_one_device(grad_output, value)
    _check_tensors(value, locations, weights, len(level_start_index))
    return value.new_empty(value.shape), locations.new_empty(locations.shape), weights.new_empty(weights.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    value, ctx.spatial_shapes, ctx.level_start_index, locations, weights = inputs
    ctx.save_for_backward(value, locations, weights)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
    value, locations, weights = ctx.saved_tensors
    of_value, of_locations, of_weights = torch.ops.detr_bf.ms_deform_attn_backward(
        grad_output,
        value,
        ctx.spatial_shapes,
        ctx.level_start_index,
        locations,
        weights,
        torch.are_deterministic_algorithms_enabled(),
    )
    return of_value, None, None, of_locations, of_weights


if library.DECLARED:
    torch.library.register_fake("detr_bf::ms_deform_attn", _shape_of_result)
    torch.library.register_fake("detr_bf::ms_deform_attn_backward", _shapes_of_gradients)
    torch.library.register_autograd("detr_bf::ms_deform_attn", _gradients, setup_context=_remember)
