"""Name tables of Hugging Face transformers: DETR, Conditional DETR, DAB-DETR, Deformable DETR, RT-DETR and D-FINE.

Names of transformers 5 are written and read; names of transformers 4, in most published files, are only read. The
backbone is timm's ResNet with torchvision's names, or transformers' own (``no_timm`` files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps

from detr_bf.interop.official import (
    NORMED_SEQUENCE,
    RTDETR_LEVELS,
    VD_BLOCKS,
    VD_STEM,
    VIT_BLOCKS,
    VIT_MAPS,
    bottlenecks,
    deformable_attention,
    deformable_heads,
    dfine_fusion,
    dinov2,
    normed_convolution,
    product_masks,
    rfdetr_queries,
    rtdetr_fusion,
    rtdetr_queries,
)
from detr_bf.interop.rules import BODY, Layout, NameRule, rename, within

TIMM_MODULE = "_backbone"  # module around timm's network in some of their detectors
HGNET_BLOCKS, HGNET_LAYERS = 6, 6  # at most: blocks of a stage of HGNetv2, layers of a block
FULLY_CONNECTED = ("mlp.fc1", "mlp.fc2")
Table = Callable[[Layout], Iterator[NameRule]]


def hf_detr(layout: Layout) -> Iterator[NameRule]:
    """DetrForObjectDetection."""
    yield from _around(layout)
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from _attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention.attention")


def hf_conditional_detr(layout: Layout) -> Iterator[NameRule]:
    """ConditionalDetrForObjectDetection."""
    yield from _around(layout)
    yield rename("model.decoder.ref_point_head", "decoder.queries.reference")
    yield rename("model.decoder.query_scale", "decoder.update_queries.scale")
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        for name, part, old in (("self_attn", "self_attention", "sa"), ("encoder_attn", "cross_attention", "ca")):
            for kind, ours_kind in (("content", "content"), ("pos", "position")):
                for letter, role in (("q", "query"), ("k", "key")):
                    yield rename(
                        f"{theirs}.{name}.{letter}_{kind}_proj",
                        f"{ours}.{part}.{ours_kind}_{role}",
                        older=[f"{theirs}.{old}_{letter}{kind}_proj"],
                    )
            yield rename(f"{theirs}.{name}.v_proj", f"{ours}.{part}.value", older=[f"{theirs}.{old}_v_proj"])
            yield rename(f"{theirs}.{name}.o_proj", f"{ours}.{part}.out", older=[f"{theirs}.{name}.out_proj"])
        yield rename(
            f"{theirs}.encoder_attn.q_pos_sine_proj",
            f"{ours}.cross_attention.sine_query",
            older=[f"{theirs}.ca_qpos_sine_proj"],
        )


def hf_dab_detr(layout: Layout) -> Iterator[NameRule]:
    """DabDetrForObjectDetection."""
    yield rename(f"model.backbone.conv_encoder.model.{TIMM_MODULE}", BODY)
    yield rename("model.input_projection", "tokens.projections.0")
    yield rename("model.query_refpoint_embeddings", "decoder.queries.anchors")
    yield rename("model.patterns", "decoder.queries.patterns")
    yield rename("model.encoder.query_scale", "encoder.position_scale")
    yield rename("model.decoder.query_scale", "decoder.update_queries.scale")
    yield rename("model.decoder.ref_point_head", "decoder.update_queries.point")
    yield rename("model.decoder.ref_anchor_head", "decoder.update_queries.size")
    yield rename("model.encoder.norm", "encoder.norm")
    yield rename("model.decoder.layernorm", "decoder.norm")
    yield rename("class_embed", "decoder.heads.classes.0")
    yield rename(["bbox_predictor", "model.decoder.bbox_embed"], "decoder.heads.boxes.0")
    for theirs, ours in _layers("encoder", layout.encoder_layers):
        for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
            yield rename(f"{theirs}.self_attn.{letter}_proj", f"{ours}.attention.attention.{part}")
        yield rename(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_residual.norm")
        yield from _dab_feed_forward(theirs, ours)
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        for name in ("self", "cross"):
            inside = f"{theirs}.{name}_attn.{name}_attn"
            for role in ("query", "key"):
                for kind, our_kind in (("content", "content"), ("pos", "position")):
                    yield rename(f"{inside}_{role}_{kind}_proj", f"{ours}.{name}_attention.{our_kind}_{role}")
            yield rename(f"{inside}_query_pos_sine_proj", f"{ours}.{name}_attention.sine_query")
            yield rename(f"{inside}_value_proj", f"{ours}.{name}_attention.value")
            yield rename(f"{inside}.output_proj", f"{ours}.{name}_attention.out")
            yield rename(f"{inside}_layer_norm", f"{ours}.{name}_residual.norm")
        yield from _dab_feed_forward(f"{theirs}.mlp", ours)


def _dab_feed_forward(theirs: str, ours: str) -> Iterator[NameRule]:
    yield rename(f"{theirs}.fc1", f"{ours}.feed_forward.expand")
    yield rename(f"{theirs}.activation_fn", f"{ours}.feed_forward.activation")
    yield rename(f"{theirs}.fc2", f"{ours}.feed_forward.contract")
    yield rename(f"{theirs}.final_layer_norm", f"{ours}.feed_forward_residual.norm")


def hf_deformable_detr(layout: Layout) -> Iterator[NameRule]:
    """DeformableDetrForObjectDetection in all variants."""
    yield from _backbone()
    yield rename("model.input_proj", "tokens.projections")
    yield rename("model.level_embed", "tokens.level_embedding")
    queries = ("decoder.queries.position.weight", "decoder.queries.content.weight")
    yield NameRule(("model.query_position_embeddings.weight",), queries, dim=1)
    yield rename("model.reference_points", "decoder.queries.reference")
    yield rename("model.enc_output", "decoder.queries.project")
    yield rename("model.enc_output_norm", "decoder.queries.norm")
    yield rename("model.pos_trans", "decoder.queries.embed")
    yield rename("model.pos_trans_norm", "decoder.queries.embed_norm")
    yield from _untied(deformable_heads(layout, "model.decoder"), layout)
    for theirs, ours in _layers("encoder", layout.encoder_layers):
        yield from deformable_attention(f"{theirs}.self_attn", f"{ours}.attention.attention")
        yield from _encoder_layer(theirs, ours)
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from deformable_attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention.attention")
        yield from _decoder_layer(theirs, ours)


def hf_rtdetr(layout: Layout) -> Iterator[NameRule]:
    """RTDetrForObjectDetection."""
    for rule in hf_rtdetrv2(layout):
        if len(rule.theirs) > 1:  # the heads, stored once
            yield replace(rule, theirs=rule.theirs[:1], older=rule.theirs[1:])
        elif not rule.theirs[0].endswith("n_points_scale"):
            yield rule


def hf_rtdetrv2(layout: Layout) -> Iterator[NameRule]:
    """RTDetrV2ForObjectDetection."""
    yield from _resnet_vd()
    yield from _hybrid_encoder(layout)
    yield from rtdetr_fusion("model.encoder")
    yield from rtdetr_queries("model", "model.decoder", ("0", "1"))
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from deformable_attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention.attention")
        yield rename(f"{theirs}.encoder_attn.n_points_scale", f"{ours}.cross_attention.attention.scale")
        yield from _decoder_layer(theirs, ours)
    yield from _heads_of_layers(layout)


def hf_rfdetr(layout: Layout) -> Iterator[NameRule]:
    """RfDetrForObjectDetection, without the token of masked patches; its projector has one level."""
    attention = [f"attention.{letter}_proj" for letter in "qkvo"]
    yield from dinov2("model.backbone.backbone", attention)
    yield from _projection("model.backbone.projector", 0)
    yield from _rfdetr_decoder(layout)


def hf_rfdetr_masks(layout: Layout) -> Iterator[NameRule]:
    """RfDetrForInstanceSegmentation, which contains the detector."""
    yield from within("model", hf_rfdetr(layout))
    block = {"depthwise_conv": "depthwise", "layernorm": "norm", "pointwise_conv": "pointwise"}
    head = {"query_features_block.norm": "query_residual.norm", "query_features_block.mlp.fc1": "query_mlp.layers.0"}
    head |= {"query_features_block.mlp.fc2": "query_mlp.layers.1", "segmentation_bias": "bias"}
    yield from product_masks(layout, block, head)


def hf_lwdetr(layout: Layout) -> Iterator[NameRule]:
    """LwDetrForObjectDetection, whose keys in the backbone have no bias, which would not change the attention."""
    vit, body = "model.backbone.backbone", f"{BODY}.vit"
    yield rename(f"{vit}.embeddings.position_embeddings", f"{body}.pos_embed")
    yield rename(f"{vit}.embeddings.projection", f"{body}.patch_embed.proj")
    names = {"attention.o_proj": "attn.proj", "intermediate": "mlp", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    names |= {"layernorm_before": "norm1", "layernorm_after": "norm2"}
    for block in range(VIT_BLOCKS):
        theirs, ours = f"{vit}.encoder.layer.{block}", f"{body}.blocks.{block}"
        query, key, value = (f"{theirs}.attention.{letter}_proj" for letter in "qkv")
        weights = tuple(f"{name}.weight" for name in (query, key, value))
        yield NameRule(weights, (f"{ours}.attn.qkv.weight",), joined=True)
        yield NameRule((f"{query}.bias", "", f"{value}.bias"), (f"{ours}.attn.qkv.bias",), joined=True)
        for name, place in names.items():
            yield rename(f"{theirs}.{name}", f"{ours}.{place}")
    for level in range(RTDETR_LEVELS):
        scale = f"model.backbone.projector.scale_layers.{level}"
        yield from _projection(scale, level)
        for number in range(VIT_MAPS):
            theirs, ours = f"{scale}.sampling_layers.{number}.layers", f"tokens.projections.{level}.resize.{number}"
            yield rename(theirs, ours)
            yield from normed_convolution(f"{theirs}.0", f"{ours}.0", (("conv", "0"), ("norm", "1")))
    yield from _rfdetr_decoder(layout)


def _projection(theirs: str, level: int) -> Iterator[NameRule]:
    """Yield the rules of one level of the projector of RF-DETR and LW-DETR."""
    ours = f"tokens.projections.{level}"
    yield rename(f"{theirs}.layer_norm", f"{ours}.norm")
    yield from bottlenecks(f"{theirs}.projector_layer", f"{ours}.block", "bottlenecks", "conv", "norm")


def _rfdetr_decoder(layout: Layout) -> Iterator[NameRule]:
    yield from rfdetr_queries("model", ("model.query_feat", "model.reference_point_embed"))
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from deformable_attention(f"{theirs}.cross_attn", f"{ours}.cross_attention.attention")
        yield rename(f"{theirs}.self_attn_layer_norm", f"{ours}.self_residual.norm")
        yield rename(f"{theirs}.cross_attn_layer_norm", f"{ours}.cross_residual.norm")
        yield rename(f"{theirs}.mlp.fc1", f"{ours}.feed_forward.expand")
        yield rename(f"{theirs}.mlp.fc2", f"{ours}.feed_forward.contract")
        yield rename(f"{theirs}.layer_norm", f"{ours}.feed_forward_residual.norm")
    yield rename("model.decoder.layernorm", "decoder.norm")


def hf_dfine(layout: Layout) -> Iterator[NameRule]:
    """DFineForObjectDetection."""
    feed_forward = ("mlp.layers.0", "mlp.layers.1")
    yield from _hgnetv2()
    yield from _hybrid_encoder(layout, feed_forward)
    block = ("conv1", "csp_rep1", "conv2", "csp_rep2", "conv3", "conv4")
    yield from dfine_fusion("model.encoder", ("conv1", "conv2"), block)
    yield from rtdetr_queries("model", "model.decoder", ("0", "1"))
    yield rename("model.decoder.pre_bbox_head", "decoder.heads.first_box")
    for name in ("up", "reg_scale"):
        yield rename(f"model.decoder.{name}", f"decoder.{name}")
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from deformable_attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention.attention")
        yield rename(f"{theirs}.encoder_attn.num_points_scale", f"{ours}.cross_attention.attention.scale")
        yield rename(f"{theirs}.self_attn_layer_norm", f"{ours}.self_residual.norm")
        yield rename(f"{theirs}.gateway", f"{ours}.cross_residual")
        yield from _feed_forward(theirs, ours, feed_forward)
    for layer in range(layout.decoder_layers):
        yield rename(f"model.decoder.lqe_layers.{layer}.reg_conf", f"decoder.heads.quality.{layer}")
    yield from _heads_of_layers(layout)


def own_resnet(table: Table) -> Table:
    """Return ``table`` with transformers' own ResNet as backbone."""

    @wraps(table)
    def with_own_resnet(layout: Layout) -> Iterator[NameRule]:
        for rule in table(layout):
            if rule.ours == (BODY,):
                yield from _own_resnet(layout, rule)
            else:
                yield rule

    return with_own_resnet


def _untied(heads: Iterator[NameRule], layout: Layout) -> Iterator[NameRule]:
    """Copy a single class head of a file with refinement to all layers."""
    one = layout.refine and layout.class_heads == 1
    others = tuple(f"decoder.heads.classes.{layer}" for layer in range(1, layout.decoder_layers))
    for rule in heads:
        if one and rule.ours == ("decoder.heads.classes.0",):
            yield replace(rule, copies=others)
        elif not (one and rule.ours[0] in others):
            yield rule


def _backbone() -> Iterator[NameRule]:
    yield rename("model.backbone.model", BODY, older=["model.backbone.conv_encoder.model"])
    for axis in ("column", "row"):
        yield rename(
            f"model.position_embedding.{axis}_embeddings",
            f"tokens.position.{axis}",
            older=[f"model.backbone.position_embedding.{axis}_embeddings"],
        )


def _resnet_vd() -> Iterator[NameRule]:
    """The library's ResNet-vd, with timm's order of convolutions."""
    body = "model.backbone.model"
    rows = [(f"embedder.embedder.{index}", *names) for index, names in enumerate(VD_STEM)]
    for stage in range(4):
        for block in range(VD_BLOCKS):
            theirs, ours = f"encoder.stages.{stage}.layers.{block}", f"layer{stage + 1}.{block}"
            for index in range(3):
                rows.append((f"{theirs}.layer.{index}", f"{ours}.conv{index + 1}", f"{ours}.bn{index + 1}"))
        short, ours = f"encoder.stages.{stage}.layers.0.shortcut", f"layer{stage + 1}.0.downsample"
        rows.append((f"{short}.1" if stage else short, f"{ours}.1", f"{ours}.2"))  # .1: after a pooling
    for theirs, convolution, norm in rows:
        yield rename(f"{body}.{theirs}.convolution", f"{BODY}.{convolution}")
        yield rename(f"{body}.{theirs}.normalization", f"{BODY}.{norm}")


def _hgnetv2() -> Iterator[NameRule]:
    body = "model.backbone.model"
    rows = [(f"embedder.stem{part}", f"stem.stem{part}") for part in ("1", "2a", "2b", "3", "4")]
    for stage in range(4):
        theirs, ours = f"encoder.stages.{stage}", f"stages_{stage}"
        rows.append((f"{theirs}.downsample", f"{ours}.downsample"))
        for block in range(HGNET_BLOCKS):
            inside = [f"layers.{layer}{part}" for layer in range(HGNET_LAYERS) for part in ("", ".conv1", ".conv2")]
            inside += [f"aggregation.{number}" for number in range(2)]
            rows += [(f"{theirs}.blocks.{block}.{each}", f"{ours}.blocks.{block}.{each}") for each in inside]
    for theirs, ours in rows:
        for part, own in (("convolution", "conv"), ("normalization", "bn"), ("lab", "lab")):
            yield rename(f"{body}.{theirs}.{part}", f"{BODY}.{ours}.{own}")


def _hybrid_encoder(layout: Layout, feed_forward: Sequence[str] = FULLY_CONNECTED) -> Iterator[NameRule]:
    """Yield the rules of the projections and of the encoder layers."""
    for level in range(RTDETR_LEVELS):
        for name, ours in (("encoder_input_proj", "tokens"), ("decoder_input_proj", "encoder")):
            yield from normed_convolution(f"model.{name}.{level}", f"{ours}.projections.{level}", NORMED_SEQUENCE)
    for layer in range(layout.encoder_layers):
        theirs, ours = f"model.encoder.aifi.0.layers.{layer}", f"encoder.encoder.layers.{layer}"
        attention = _attention(f"{theirs}.self_attn", f"{ours}.attention.attention")
        for rule in (*attention, *_encoder_layer(theirs, ours, feed_forward)):
            names = (name.replace(".aifi.", ".encoder.") for name in (*rule.theirs, *rule.older))
            yield replace(rule, older=tuple(names))


def _heads_of_layers(layout: Layout) -> Iterator[NameRule]:
    """Yield the rules of the heads, which a file holds in the decoder and again beside it."""
    for layer in range(layout.decoder_layers):
        for name, heads in (("class_embed", "classes"), ("bbox_embed", "boxes")):
            yield rename((f"model.decoder.{name}.{layer}", f"{name}.{layer}"), f"decoder.heads.{heads}.{layer}")


def _own_resnet(layout: Layout, body: NameRule) -> Iterator[NameRule]:
    """Yield the rules of the modules inside the backbone of the rule ``body``."""
    yield from _convolution(body, "embedder.embedder", "conv1", "bn1")
    for stage in range(4):
        for block in range(layout.backbone_blocks):
            theirs, ours = f"encoder.stages.{stage}.layers.{block}", f"layer{stage + 1}.{block}"
            yield from _convolution(body, f"{theirs}.shortcut", f"{ours}.downsample.0", f"{ours}.downsample.1")
            for index in range(3):
                convolution, norm = f"{ours}.conv{index + 1}", f"{ours}.bn{index + 1}"
                yield from _convolution(body, f"{theirs}.layer.{index}", convolution, norm)


def _convolution(body: NameRule, theirs: str, convolution: str, norm: str) -> Iterator[NameRule]:
    for part, ours in (("convolution", convolution), ("normalization", norm)):
        names, older = (
            [f"{module.removesuffix(f'.{TIMM_MODULE}')}.{theirs}.{part}" for module in modules]
            for modules in (body.theirs, body.older)
        )
        yield rename(names, f"{BODY}.{ours}", older=older)


def _around(layout: Layout) -> Iterator[NameRule]:
    """Yield all rules of detectors with one feature map, except for attention in the decoder."""
    yield from _backbone()
    for kind in ("weight", "bias"):  # only the convolution: theirs has no norm after it
        yield rename(f"model.input_projection.{kind}", f"tokens.projections.0.{kind}")
    yield rename("model.query_position_embeddings", "decoder.queries.position")
    for theirs, ours in _layers("encoder", layout.encoder_layers):
        yield from _attention(f"{theirs}.self_attn", f"{ours}.attention.attention")
        yield from _encoder_layer(theirs, ours)
    for theirs, ours in _layers("decoder", layout.decoder_layers):
        yield from _decoder_layer(theirs, ours)
    yield rename("model.decoder.layernorm", "decoder.norm")
    yield rename("class_labels_classifier", "decoder.heads.classes.0")
    yield rename("bbox_predictor", "decoder.heads.boxes.0")


def _layers(name: str, count: int) -> Iterator[tuple[str, str]]:
    for layer in range(count):
        yield f"model.{name}.layers.{layer}", f"{name}.layers.{layer}"


def _encoder_layer(theirs: str, ours: str, feed_forward: Sequence[str] = FULLY_CONNECTED) -> Iterator[NameRule]:
    yield rename(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_residual.norm")
    yield from _feed_forward(theirs, ours, feed_forward)


def _decoder_layer(theirs: str, ours: str) -> Iterator[NameRule]:
    yield rename(f"{theirs}.self_attn_layer_norm", f"{ours}.self_residual.norm")
    yield rename(f"{theirs}.encoder_attn_layer_norm", f"{ours}.cross_residual.norm")
    yield from _feed_forward(theirs, ours)


def _feed_forward(theirs: str, ours: str, names: Sequence[str] = FULLY_CONNECTED) -> Iterator[NameRule]:
    yield rename(f"{theirs}.{names[0]}", f"{ours}.feed_forward.expand", older=[f"{theirs}.fc1"])
    yield rename(f"{theirs}.{names[1]}", f"{ours}.feed_forward.contract", older=[f"{theirs}.fc2"])
    yield rename(f"{theirs}.final_layer_norm", f"{ours}.feed_forward_residual.norm")


def _attention(theirs: str, ours: str) -> Iterator[NameRule]:
    for letter, part in (("q", "query"), ("k", "key"), ("v", "value")):
        yield rename(f"{theirs}.{letter}_proj", f"{ours}.{part}")
    yield rename(f"{theirs}.o_proj", f"{ours}.out", older=[f"{theirs}.out_proj"])
