"""Changed vision transformers that papers compare their methods with: other attention, MLP, or one more block.

``model.variant`` chooses one, in Python the argument ``variant`` of
:func:`detr_bf.classification.network.build_network`. They are parts of the network with weights of their own, not
plug-ins: they are active in training and in evaluation, cannot be removed, and have no published weights.

Shape legend: R images, S tokens with the class token, C channels, H heads, D = C / H channels of a head.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import timm
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.layers.squeeze_excite import SqueezeExciteCl
from timm.models import named_apply
from timm.models.cait import TalkingHeadAttn
from timm.models.vision_transformer import Block, VisionTransformer, get_init_weights_vit
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.plugins.context_broadcasting import broadcast_context

_NO_MASK = "got an attention mask, which the {} of model.variant does not support: call the network without attn_mask"


class TalkingHeads(TalkingHeadAttn):
    """Attention whose heads are mixed before and after the softmax (Shazeer et al. 2020, arXiv 2003.02436).

    With queries, keys and values q, k, v of head h and trained (H, H) matrices L and W:
    ``A_h = sum_g W[h, g] softmax(sum_f L[g, f] q_f k_f^T / sqrt(D))``, and the output of head h is ``A_h v_h``.

    timm's class for CaiT, without the biases of the mixtures: the code of DiversePatch, whose Table 6 (arXiv
    2104.12753) has this row, has none (ChengyueGongR/PatchVisionTransformer at 0682d1f, ``deit/models.py``).

    Raises:
        InputError: the model has norms in its attention or a projection without bias, which timm's class has not; or,
            in a forward pass, an attention mask is given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        norm_layer: type[nn.Module] | None = None,
        device: Any = None,
        dtype: Any = None,
        **settings: Any,
    ) -> None:
        given = {"qk_norm=true": qk_norm, "scale_norm=true": scale_norm, "proj_bias=false": not proj_bias}
        if wrong := [setting for setting, is_given in given.items() if is_given]:
            raise InputError(
                f"model.variant=talking_heads has no {', '.join(wrong)}: leave that out of model.options, or choose "
                "another model, such as deit_small_patch16_224"
            )
        if dim % num_heads:
            raise InputError(
                f"model.variant=talking_heads needs heads that divide the width {dim}, got {num_heads}: change "
                "model.options.num_heads"
            )
        super().__init__(dim, num_heads, device=device, dtype=dtype, **settings)
        self.proj_l = nn.Linear(num_heads, num_heads, bias=False, device=device, dtype=dtype)
        self.proj_w = nn.Linear(num_heads, num_heads, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        if attn_mask is not None or is_causal:
            raise InputError(_NO_MASK.format("talking heads"))
        return cast("Tensor", super().forward(x))


class UniformHeadAttention(Attention):
    """Attention with Context Broadcasting in place of its last head, row A of Table 1 of arXiv 2210.08457 (ICCV 2023).

    With the values v (S, D) of that head, token i gets ``(v_i + 1/S sum_j v_j) / 2`` (Eq. 1), and all H heads are
    concatenated and projected as usual. The paper does not write the formula of such a head. Chosen here: it keeps its
    values and its part of the projection, and has no queries and keys. DeiT-S then has 21.46 million parameters (paper:
    21 M). The mean runs over all tokens, class token included.

    ``uniform_value`` and ``uniform_proj`` are the rows and columns of that head in the two linear layers.

    Raises:
        InputError: there are fewer than two heads, they do not divide ``dim``, or the heads have a common norm; or, in
            a forward pass, an attention mask is given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        scale_norm: bool = False,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **settings: Any,
    ) -> None:
        if num_heads < 2 or dim % num_heads:
            raise InputError(
                f"model.variant=uniform_head needs two or more heads that divide the width {dim}, got {num_heads}: "
                "change model.options.num_heads"
            )
        if scale_norm:
            raise InputError("model.variant=uniform_head has no norm of all heads: give scale_attn_norm=false")
        width = dim // num_heads
        own = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads - 1, attn_head_dim=width, qkv_bias=qkv_bias, **own, **settings)
        self.uniform_value = nn.Linear(dim, width, bias=qkv_bias, **own)
        self.uniform_proj = nn.Linear(width, dim, bias=False, **own)
        self.dropout = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        if attn_mask is not None or is_causal:
            raise InputError(_NO_MASK.format("uniform head"))
        learned = super().forward(x)
        return cast("Tensor", self.dropout(learned + self.uniform_proj(broadcast_context(self.uniform_value(x)))))


class SqueezeExcitedMlp(Mlp):
    """MLP whose output channels are scaled by squeeze and excitation (Hu et al. 2018, arXiv 1709.01507, section 3).

    With the MLP's output y (S, C): ``y * sigmoid(W_2 relu(W_1 mean_j y_j + b_1) + b_2)``, W_1 (C/16, C).

    It is the row SE of Table 3 of Context Broadcasting (arXiv 2210.08457), which states neither place, blocks nor
    reduction. Chosen here: the end of the MLP, where the paper has Context Broadcasting, in all blocks, the mean over
    all tokens with the class token, and the reduction 16 of Hu et al.
    """

    def __init__(self, in_features: int, device: Any = None, dtype: Any = None, **settings: Any) -> None:
        super().__init__(in_features, device=device, dtype=dtype, **settings)
        self.se = SqueezeExciteCl(in_features, rd_divisor=1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        return cast("Tensor", self.se(super().forward(x)[:, None])[:, 0])  # timm's module wants two axes of tokens


class ExtraBlock(nn.Module):
    """Attention or MLP alone with norm and residual, behind the last block: ``x + part(norm(x))``.

    The two curves of Fig. 3 of Context Broadcasting (arXiv 2210.08457): one more block of attention or MLP "at the last
    layer" of a ViT of 8 blocks, with nearly equal parameters and FLOPs. Chosen here: behind the last block, before the
    last norm; a hidden layer of 2 C in the MLP, because its 4 C^2 weights are those of attention (an ordinary MLP has
    8 C^2); drop path and layer scale of the last block.

    Args:
        last: timm's ``Block`` of the same network, whose modules are copied.
        part: ``attention`` or ``mlp``.

    Raises:
        InputError: the MLP has a norm of its hidden layer.
    """

    def __init__(self, last: nn.Module, part: str) -> None:
        super().__init__()
        attention = ("norm1", "attn", "ls1", "drop_path1")
        for name in attention if part == "attention" else ("norm2", "mlp", "ls2", "drop_path2"):
            self.add_module(name, copy.deepcopy(getattr(last, name)))
        if part == "mlp":
            mlp: Any = self.mlp
            if not isinstance(mlp.norm, nn.Identity):
                raise InputError("model.variant=extra_mlp has no norm of its hidden layer: give scale_mlp_norm=false")
            dim, weight = mlp.fc1.in_features, mlp.fc1.weight
            like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            mlp.fc1 = nn.Linear(dim, 2 * dim, bias=mlp.fc1.bias is not None, **like)
            mlp.fc2 = nn.Linear(2 * dim, dim, bias=mlp.fc2.bias is not None, **like)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        part: Any = self
        if hasattr(part, "attn"):
            return cast("Tensor", x + part.drop_path1(part.ls1(part.attn(part.norm1(x), attn_mask, is_causal))))
        return cast("Tensor", x + part.drop_path2(part.ls2(part.mlp(part.norm2(x)))))


PLAIN = "plain"
_LAYERS: dict[str, dict[str, type[nn.Module]]] = {  # by model.variant: arguments of timm.create_model
    "talking_heads": {"attn_layer": TalkingHeads},
    "uniform_head": {"attn_layer": UniformHeadAttention},
    "squeeze_excitation": {"mlp_layer": SqueezeExcitedMlp},
    "extra_attention": {},
    "extra_mlp": {},
}


def variant_layers(variant: str, name: str, pretrained: bool) -> dict[str, type[nn.Module]]:
    """Return the arguments of ``timm.create_model`` for ``variant``.

    Raises:
        InputError: there is no such variant, timm is too old for them, its model ``name`` is no ViT or DeiT, or its
            weights are wanted.
    """
    if variant == PLAIN:
        return {}
    if variant not in _LAYERS:
        raise InputError(f"model.variant={variant}: give one of {', '.join([PLAIN, *_LAYERS])}")
    if "attn_layer" not in inspect.signature(VisionTransformer).parameters:
        raise InputError(f"model.variant={variant} needs timm 1.0.23, here is {timm.__version__}: upgrade timm")
    if not timm.models.is_model_in_modules(name, {"vision_transformer", "deit"}):
        raise InputError(f"model.variant={variant} needs a ViT or DeiT of timm, such as deit_small_patch16_224")
    if pretrained:
        raise InputError(f"model.variant={variant} has no weights in timm: set model.pretrained=false")
    return _LAYERS[variant]


def complete_variant(network: nn.Module, variant: str) -> None:
    """Append the block that a variant may have to a new network, with initial weights as timm draws them (in-place).

    Raises:
        InputError: the blocks of the network are not timm's ordinary ones, with the layers of the variant, or
            :class:`ExtraBlock` cannot follow them.
    """
    if variant == PLAIN:
        return
    wanted = {"attn_layer": Attention, "mlp_layer": Mlp, **_LAYERS[variant]}
    blocks = list(network.blocks) if isinstance(network, VisionTransformer) else []
    kinds = {tuple(type(part) for part in (block, *map(block._modules.get, ("attn", "mlp")))) for block in blocks}
    if kinds != {(Block, wanted["attn_layer"], wanted["mlp_layer"])}:
        names = sorted(" with ".join(kind.__name__ for kind in found) for found in kinds)
        raise InputError(
            f"model.variant={variant}: the network has blocks of the kind {names}, expected timm's ordinary Block, "
            "Attention and Mlp: choose another model.name, such as deit_small_patch16_224, and leave block_fn, "
            "attn_layer and mlp_layer out of model.options"
        )
    if not _LAYERS[variant]:
        extra = ExtraBlock(blocks[-1], variant.removeprefix("extra_"))
        vit = cast("Any", network)
        named_apply(get_init_weights_vit(vit.weight_init_mode, needs_reset=False), extra)
        vit.blocks.append(extra)
        vit.feature_info.append({**vit.feature_info[-1], "module": f"blocks.{len(blocks)}"})
