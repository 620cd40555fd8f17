"""Name tables of the authors' repositories and of detectron2.

The repositories are DETR, Conditional DETR, SMCA, Deformable DETR and their BatchFormerV2 forks, H-DETR, DAB-DETR,
DN-DETR, DINO, RT-DETR and D-FINE; two foreign names for one of ours mean that their code refers to the same module
twice. Inside detectron2 there are our adapter and official DETR's wrapper. Detectron2's ResNets are torchvision's under
other names if their bottlenecks have the stride in the 3 x 3 convolution (``MODEL.RESNETS.STRIDE_IN_1X1: False``).
This module does not import detectron2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from detr_bf.interop.rules import BODY, Layout, NameRule, rename, within

PARTS = ("query", "key", "value")
MASK_LAYERS, MASK_ADAPTERS = 5, 3  # in the mask head
RTDETR_LEVELS, FUSION_BLOCKS = 3, 6  # at most: maps; RepVGG blocks of one fusion
VD_BLOCKS = 23  # of the longest stage of a ResNet-vd
VD_STEM = (("conv1.0", "conv1.1"), ("conv1.3", "conv1.4"), ("conv1.6", "bn1"))  # our convolutions with their norms
NORMED = (("conv", "convolution"), ("norm", "norm"))  # a convolution with its norm
VIT_BLOCKS, VIT_MAPS, BOTTLENECKS, MOST_GROUPS = 40, 12, 3, 64  # at most
NORMED_SEQUENCE = (("0", "convolution"), ("1", "norm"))
ADAPTER = "detector"  # module of the adapter that holds our detector
CONDITIONAL_SELF = {
    "sa_qcontent_proj": "content_query",
    "sa_qpos_proj": "position_query",
    "sa_kcontent_proj": "content_key",
    "sa_kpos_proj": "position_key",
    "sa_v_proj": "value",
    "self_attn.out_proj": "out",
}
CONDITIONAL_CROSS = {
    "ca_qcontent_proj": "content_query",
    "ca_qpos_proj": "position_query",
    "ca_qpos_sine_proj": "sine_query",
    "ca_kcontent_proj": "content_key",
    "ca_kpos_proj": "position_key",
    "ca_v_proj": "value",
    "cross_attn.out_proj": "out",
}


def official_detr(layout: Layout) -> Iterator[NameRule]:
    """facebookresearch/detr, and zhihou7/BatchFormer's fork of it."""
    yield from _around(layout)
    yield rename("query_embed", "decoder.queries.position")
    yield from _shared_heads()
    for theirs, ours in _encoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.attention.attention")
    for theirs, ours in _decoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from _packed(f"{theirs}.multihead_attn", f"{ours}.cross_attention.attention")


def detr_panoptic(layout: Layout) -> Iterator[NameRule]:
    """facebookresearch/detr with a mask head: the detector is one of its modules."""
    yield from within("detr", official_detr(layout))
    yield rename("bbox_attention.q_linear", "mask_head.attention.query")
    yield rename("bbox_attention.k_linear", "mask_head.attention.key")
    yield rename("mask_head.out_lay", "mask_head.convolutions.out")
    for index in range(MASK_LAYERS):
        yield rename(f"mask_head.lay{index + 1}", f"mask_head.convolutions.layers.{index}")
        yield rename(f"mask_head.gn{index + 1}", f"mask_head.convolutions.norms.{index}")
    for index in range(MASK_ADAPTERS):
        yield rename(f"mask_head.adapter{index + 1}", f"mask_head.convolutions.adapters.{index}")


def official_conditional_detr(layout: Layout) -> Iterator[NameRule]:
    """Atten4Vis/ConditionalDETR."""
    yield rename("query_embed", "decoder.queries.position")
    yield rename("transformer.decoder.ref_point_head", "decoder.queries.reference")
    yield from _shared_heads()
    yield from _conditional_layers(layout)


def _conditional_layers(layout: Layout) -> Iterator[NameRule]:
    """Yield the rules of Conditional DETR and DAB-DETR without those of the queries and heads."""
    yield from _around(layout)
    yield rename("transformer.decoder.query_scale", "decoder.update_queries.scale")
    for theirs, ours in _encoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.attention.attention")
    for theirs, ours in _decoder_layers(layout):
        for name, part in CONDITIONAL_SELF.items():
            yield rename(f"{theirs}.{name}", f"{ours}.self_attention.{part}")
        for name, part in CONDITIONAL_CROSS.items():
            yield rename(f"{theirs}.{name}", f"{ours}.cross_attention.{part}")


def official_dab_detr(layout: Layout) -> Iterator[NameRule]:
    """IDEA-Research/DAB-DETR, and IDEA-Research/DN-DETR on it."""
    yield from _conditional_layers(layout)
    yield rename("refpoint_embed", "decoder.queries.anchors")
    yield rename("transformer.patterns", "decoder.queries.patterns")
    yield rename("label_enc", "decoder.queries.labels")
    yield rename("transformer.encoder.query_scale", "encoder.position_scale")
    yield rename("transformer.decoder.ref_point_head", "decoder.update_queries.point")
    yield rename("transformer.decoder.ref_anchor_head", "decoder.update_queries.size")
    yield rename("class_embed", "decoder.heads.classes.0")
    yield rename(["bbox_embed", "transformer.decoder.bbox_embed"], "decoder.heads.boxes.0")


def official_smca(layout: Layout) -> Iterator[NameRule]:
    """gaopengcuhk/SMCA-DETR."""
    yield from _around(layout)
    for theirs, ours in _encoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.attention.attention")
    for theirs, ours in _decoder_layers(layout):
        yield rename(f"{theirs}.point2", f"{ours}.cross_attention.gaussian.offset")
        yield rename(f"{theirs}.point3", f"{ours}.cross_attention.gaussian.scale")
    yield from _gaussian_decoder(layout)


def official_smca_multi_scale(layout: Layout) -> Iterator[NameRule]:
    """Multi_scale_SMCA.zip of gaopengcuhk/SMCA-DETR."""
    yield from _backbone()
    for level, width in enumerate((512, 1024, 2048)):
        yield rename(f"input_proj_{width}", f"tokens.tokens.projections.{level}")
    yield rename("input_proj_2048_3", "tokens.convolution")
    yield rename("transformer.level_embed", "tokens.tokens.level_embedding")
    yield rename("transformer.conv", "encoder.reduce")
    for theirs, ours in _layers("encoder", layout.encoder_layers, "encoder."):
        yield from _feed_forward(theirs, ours, norm="norm2")
        yield rename(f"{theirs}.norm1", f"{ours}.exchange_residual.norm")
        yield rename(f"{theirs}.conv_1", f"{ours}.enter")
        yield rename(f"{theirs}.conv_2", f"{ours}.leave")
        for level, stride in enumerate((8, 16, 32, 64)):
            yield rename(f"{theirs}.self_attn_{stride}", f"{ours}.within.{level}")
        for level in range(3):
            yield rename(f"{theirs}.high_to_low_{level + 1}", f"{ours}.to_coarser.{level}")
            yield rename(f"{theirs}.low_to_high_{level + 1}", f"{ours}.to_finer.{level}")
    for theirs, ours in _decoder_layers(layout):
        yield rename(f"{theirs}.point4", f"{ours}.cross_attention.level_weight")
        for point, name in (("point2", "offset"), ("point3", "scale")):
            for kind in ("weight", "bias"):
                parts = tuple(f"{ours}.cross_attention.gaussians.{level}.{name}.{kind}" for level in range(4))
                yield NameRule((f"{theirs}.{point}.{kind}",), parts)
    yield from _batch_former(layout, "encoder.encoder")
    yield from _decoder_norms(layout)
    yield from _gaussian_decoder(layout)


def official_deformable_detr(layout: Layout) -> Iterator[NameRule]:
    """fundamentalvision/Deformable-DETR in all its forms, zhihou7/BatchFormer's fork of it, and HDETR."""
    yield from _deformable_layers(layout)
    parts = ("decoder.queries.position.weight", "decoder.queries.content.weight")
    yield NameRule(("query_embed.weight",), parts[1:] if layout.two_stage else parts, dim=1)
    yield rename("transformer.reference_points", "decoder.queries.reference")
    yield rename("transformer.pos_trans", "decoder.queries.embed")
    yield rename("transformer.pos_trans_norm", "decoder.queries.embed_norm")
    yield from deformable_heads(layout, "transformer.decoder")


def _deformable_layers(layout: Layout) -> Iterator[NameRule]:
    """Yield the rules of Deformable DETR and DINO without those of the heads and of most queries."""
    yield from _backbone()
    yield rename("input_proj", "tokens.projections")
    yield rename("transformer.level_embed", "tokens.level_embedding")
    yield rename("transformer.enc_output", "decoder.queries.project")
    yield rename("transformer.enc_output_norm", "decoder.queries.norm")
    for theirs, ours in _encoder_layers(layout):
        yield from deformable_attention(f"{theirs}.self_attn", f"{ours}.attention.attention")
        yield from _feed_forward(theirs, ours, norm="norm2")
        yield rename(f"{theirs}.norm1", f"{ours}.attention_residual.norm")
    for theirs, ours in _decoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from deformable_attention(f"{theirs}.cross_attn", f"{ours}.cross_attention.attention")
        yield from _feed_forward(theirs, ours, norm="norm3")
        yield rename(f"{theirs}.norm1", f"{ours}.cross_residual.norm")
        yield rename(f"{theirs}.norm2", f"{ours}.self_residual.norm")
    yield from _batch_former(layout, "encoder")


def official_dab_deformable_detr(layout: Layout) -> Iterator[NameRule]:
    """DAB-Deformable-DETR of IDEA-Research/DAB-DETR."""
    yield from (rule for rule in official_deformable_detr(layout) if rule.theirs != ("query_embed.weight",))
    yield rename("refpoint_embed", "decoder.queries.anchors")
    yield rename("tgt_embed", "decoder.queries.content")
    yield rename("patterns_embed", "decoder.queries.patterns")
    yield rename("transformer.decoder.ref_point_head", "decoder.update_queries.point")
    yield rename("transformer.decoder.query_scale", "decoder.update_queries.scale")


def official_dino(layout: Layout) -> Iterator[NameRule]:
    """IDEA-Research/DINO; heads are lists of one head for each decoder layer, or of one head for all."""
    yield from _deformable_layers(layout)
    yield rename("transformer.tgt_embed", "decoder.queries.content")
    yield rename("label_enc", "decoder.queries.labels")
    yield rename("transformer.enc_out_class_embed", "decoder.queries.class_head")
    yield rename("transformer.enc_out_bbox_embed", "decoder.queries.box_head")
    yield rename("transformer.decoder.norm", "decoder.norm")
    yield rename("transformer.decoder.ref_point_head", "decoder.update_queries.point")
    for name, ours in (("class_embed", "classes"), ("bbox_embed", "boxes")):
        layers = range(layout.decoder_layers)
        for index, same in enumerate([layers] if ours in layout.shared_heads else [[layer] for layer in layers]):
            theirs = [f"{prefix}{name}.{layer}" for layer in same for prefix in ("", "transformer.decoder.")]
            yield rename(theirs, f"decoder.heads.{ours}.{index}")


def official_rtdetr(layout: Layout) -> Iterator[NameRule]:
    """rtdetr_pytorch of lyuwenyu/RT-DETR."""
    yield from _rtdetr(layout, NORMED_SEQUENCE, ("0", "1"))


def official_rtdetrv2(layout: Layout) -> Iterator[NameRule]:
    """rtdetrv2_pytorch of lyuwenyu/RT-DETR, without the anchors of one image size."""
    yield from _rtdetr(layout, NORMED, ("proj", "norm"))
    for layer in range(layout.decoder_layers):
        theirs = f"decoder.decoder.layers.{layer}.cross_attn.num_points_scale"
        yield rename(theirs, f"decoder.layers.{layer}.cross_attention.attention.scale")


def _rtdetr(layout: Layout, projection: Sequence[tuple[str, str]], proposal: tuple[str, str]) -> Iterator[NameRule]:
    yield from _resnet_vd()
    yield from _hybrid_encoder(layout, projection)
    yield from rtdetr_fusion("encoder")
    yield from rtdetr_queries("decoder", "decoder", proposal)
    yield from _rtdetr_layers(layout)
    for layer in range(layout.decoder_layers):
        theirs, ours = f"decoder.decoder.layers.{layer}", f"decoder.layers.{layer}"
        yield rename(f"{theirs}.norm2", f"{ours}.cross_residual.norm")


def _hybrid_encoder(layout: Layout, projection: Sequence[tuple[str, str]]) -> Iterator[NameRule]:
    """Yield the rules of the projections and of the encoder layers, those of the coarsest level last in their list."""
    for level in range(RTDETR_LEVELS):
        yield from normed_convolution(f"encoder.input_proj.{level}", f"tokens.projections.{level}", projection)
        yield from normed_convolution(f"decoder.input_proj.{level}", f"encoder.projections.{level}")
    encoders = [*(f"encoder.finer.{index}" for index in range(layout.finer_encoders)), "encoder.encoder"]
    for index, encoder in enumerate(encoders):
        for layer in range(layout.encoder_layers):
            theirs, ours = f"encoder.encoder.{index}.layers.{layer}", f"{encoder}.layers.{layer}"
            yield from _packed(f"{theirs}.self_attn", f"{ours}.attention.attention")
            yield from _feed_forward(theirs, ours, norm="norm2")
            yield rename(f"{theirs}.norm1", f"{ours}.attention_residual.norm")


def _rtdetr_layers(layout: Layout) -> Iterator[NameRule]:
    """Yield the rules of the decoder layers and heads of RT-DETR and D-FINE without the norms that differ."""
    for layer in range(layout.decoder_layers):
        yield from _decoder_layer(f"decoder.decoder.layers.{layer}", f"decoder.layers.{layer}")
        yield rename(f"decoder.dec_score_head.{layer}", f"decoder.heads.classes.{layer}")
        yield rename(f"decoder.dec_bbox_head.{layer}", f"decoder.heads.boxes.{layer}")


def _decoder_layer(theirs: str, ours: str) -> Iterator[NameRule]:
    """Decoder layer of RT-DETR, D-FINE and RF-DETR without the second norm."""
    yield from _packed(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
    yield from deformable_attention(f"{theirs}.cross_attn", f"{ours}.cross_attention.attention")
    yield from _feed_forward(theirs, ours, norm="norm3")
    yield rename(f"{theirs}.norm1", f"{ours}.self_residual.norm")


def official_dfine(layout: Layout) -> Iterator[NameRule]:
    """Peterande/D-FINE and ShihuaHuang95/DEIM on it, without the anchors of one image size."""
    yield rename("backbone.stem", f"{BODY}.stem")
    for stage in range(4):
        yield rename(f"backbone.stages.{stage}", f"{BODY}.stages_{stage}")
    yield from _hybrid_encoder(layout, NORMED)
    block = ("cv1", "cv2.0", "cv2.1", "cv3.0", "cv3.1", "cv4")
    yield from dfine_fusion("encoder", ("0.cv1", "0.cv2"), block)
    yield from rtdetr_queries("decoder", "decoder", ("proj", "norm"))
    yield from _rtdetr_layers(layout)
    yield rename("decoder.pre_bbox_head", "decoder.heads.first_box")
    for name in ("up", "reg_scale"):
        yield rename([f"decoder.{name}", f"decoder.decoder.{name}"], f"decoder.{name}")
    for layer in range(layout.decoder_layers):
        theirs, ours = f"decoder.decoder.layers.{layer}", f"decoder.layers.{layer}"
        yield rename(f"{theirs}.gateway", f"{ours}.cross_residual")
        yield rename(f"{theirs}.cross_attn.num_points_scale", f"{ours}.cross_attention.attention.scale")
        yield rename(f"decoder.decoder.lqe_layers.{layer}.reg_conf", f"decoder.heads.quality.{layer}")


def dfine_fusion(encoder: str, down: Sequence[str], block: Sequence[str]) -> Iterator[NameRule]:
    """Cross-scale fusion of D-FINE.

    Args:
        down: names of the two convolutions of a downsampling.
        block: names of the six parts of a fusion block, in the order in which they are applied.
    """
    for step in range(RTDETR_LEVELS - 1):
        yield from normed_convolution(f"{encoder}.lateral_convs.{step}", f"encoder.fusion.lateral.{step}")
        for number, name in enumerate(down):
            theirs = f"{encoder}.downsample_convs.{step}.{name}"
            yield from normed_convolution(theirs, f"encoder.fusion.down.{step}.{number}")
        for name, part in (("fpn_blocks", "finer"), ("pan_blocks", "coarser")):
            theirs, ours = f"{encoder}.{name}.{step}", f"encoder.fusion.{part}.{step}"
            enter, *branches, leave = (f"{theirs}.{each}" for each in block)
            yield from normed_convolution(enter, f"{ours}.enter")
            for branch, blocks, convolution in (("first", *branches[:2]), ("second", *branches[2:])):
                yield from _fusion_block(blocks, f"{ours}.{branch}.0")
                yield from normed_convolution(convolution, f"{ours}.{branch}.1")
            yield from normed_convolution(leave, f"{ours}.leave")


def _resnet_vd() -> Iterator[NameRule]:
    rows = [(f"conv1.conv1_{index + 1}", *names) for index, names in enumerate(VD_STEM)]
    for stage in range(4):
        for block in range(VD_BLOCKS):
            theirs, ours = f"res_layers.{stage}.blocks.{block}", f"layer{stage + 1}.{block}"
            for index, letter in enumerate("abc"):
                rows.append((f"{theirs}.branch2{letter}", f"{ours}.conv{index + 1}", f"{ours}.bn{index + 1}"))
        short, ours = f"res_layers.{stage}.blocks.0.short", f"layer{stage + 1}.0.downsample"
        rows.append((f"{short}.conv" if stage else short, f"{ours}.1", f"{ours}.2"))  # .conv: after a pooling
    for theirs, convolution, norm in rows:
        yield rename(f"backbone.{theirs}.conv", f"{BODY}.{convolution}")
        yield rename(f"backbone.{theirs}.norm", f"{BODY}.{norm}")


def rtdetr_queries(model: str, decoder: str, proposal: tuple[str, str]) -> Iterator[NameRule]:
    """Query selection and embeddings of RT-DETR; ``proposal``: names of the linear layer and the norm over tokens."""
    yield rename(f"{model}.enc_output.{proposal[0]}", "decoder.queries.project")
    yield rename(f"{model}.enc_output.{proposal[1]}", "decoder.queries.norm")
    yield rename(f"{model}.enc_score_head", "decoder.queries.class_head")
    yield rename(f"{model}.enc_bbox_head", "decoder.queries.box_head")
    yield rename(f"{model}.denoising_class_embed", "decoder.queries.labels")
    yield rename(f"{model}.tgt_embed", "decoder.queries.content")
    yield rename(f"{decoder}.query_pos_head", "decoder.update_queries.head")


def rtdetr_fusion(encoder: str) -> Iterator[NameRule]:
    """Cross-scale fusion of RT-DETR's hybrid encoder."""
    for step in range(RTDETR_LEVELS - 1):
        for name, part in (("lateral_convs", "lateral"), ("downsample_convs", "down")):
            yield from normed_convolution(f"{encoder}.{name}.{step}", f"encoder.fusion.{part}.{step}")
        for name, part in (("fpn_blocks", "finer"), ("pan_blocks", "coarser")):
            yield from _fusion_block(f"{encoder}.{name}.{step}", f"encoder.fusion.{part}.{step}")


def _fusion_block(theirs: str, ours: str) -> Iterator[NameRule]:
    for number, place in (("1", "enter"), ("2", "shortcut"), ("3", "leave")):
        yield from normed_convolution(f"{theirs}.conv{number}", f"{ours}.{place}")
    for block in range(FUSION_BLOCKS):
        for number, place in (("1", "wide"), ("2", "narrow")):
            yield from normed_convolution(
                f"{theirs}.bottlenecks.{block}.conv{number}", f"{ours}.blocks.{block}.{place}"
            )


def normed_convolution(theirs: str, ours: str, names: Sequence[tuple[str, str]] = NORMED) -> Iterator[NameRule]:
    """Rename a convolution and its norm inside one module; ``names``: pairs of their and our name."""
    for their_part, our_part in names:
        yield rename(f"{theirs}.{their_part}", f"{ours}.{our_part}")


def detectron2_adapter(_: Layout) -> Iterator[NameRule]:
    """detr_bf.detectron2 with our backbone, or with a detectron2 backbone that we have no table for."""
    for module in (BODY, "tokens", "encoder", "decoder", "mask_head"):
        yield rename(f"{ADAPTER}.{module}", module)


def detectron2_adapter_resnet(layout: Layout) -> Iterator[NameRule]:
    """detr_bf.detectron2 with a ResNet of detectron2."""
    yield from _with_resnet(detectron2_adapter(layout), f"{ADAPTER}.{BODY}", layout)


def detectron2_detr(layout: Layout) -> Iterator[NameRule]:
    """facebookresearch/detr in d2/."""
    yield from within("detr", _with_resnet(official_detr(layout), "backbone.0.backbone", layout))


def detectron2_detr_panoptic(layout: Layout) -> Iterator[NameRule]:
    """facebookresearch/detr in d2/, with a mask head around the detector."""
    yield from within("detr", _with_resnet(detr_panoptic(layout), "detr.backbone.0.backbone", layout))


def _backbone() -> Iterator[NameRule]:
    yield rename("backbone.0.body", BODY)


def _around(layout: Layout) -> Iterator[NameRule]:
    """Backbone, tokens, norms, feed-forward networks and BatchFormer of the detectors with one feature map."""
    yield from _backbone()
    yield rename("backbone.1.col_embed", "tokens.position.column")
    yield rename("backbone.1.row_embed", "tokens.position.row")
    for kind in ("weight", "bias"):  # only the convolution: theirs has no norm after it
        yield rename(f"input_proj.{kind}", f"tokens.projections.0.{kind}")
    yield rename("transformer.encoder.norm", "encoder.norm")
    for theirs, ours in _encoder_layers(layout):
        yield from _feed_forward(theirs, ours, norm="norm2")
        yield rename(f"{theirs}.norm1", f"{ours}.attention_residual.norm")
    yield from _decoder_norms(layout)
    yield from _batch_former(layout, "encoder")


def _decoder_norms(layout: Layout) -> Iterator[NameRule]:
    yield rename("transformer.decoder.norm", "decoder.norm")
    for theirs, ours in _decoder_layers(layout):
        yield from _feed_forward(theirs, ours, norm="norm3")
        yield rename(f"{theirs}.norm1", f"{ours}.self_residual.norm")
        yield rename(f"{theirs}.norm2", f"{ours}.cross_residual.norm")


def _gaussian_decoder(layout: Layout) -> Iterator[NameRule]:
    """SMCA's decoder; our queries also refer to the first layer's norm."""
    yield rename("query_embed", "decoder.queries.position")
    yield rename("transformer.decoder.layers.0.point1", "decoder.queries.reference.1")
    yield from _shared_heads()
    for theirs, ours in _decoder_layers(layout):
        yield from _packed(f"{theirs}.self_attn", f"{ours}.self_attention.attention")
        yield from _packed(f"{theirs}.multihead_attn", f"{ours}.cross_attention.attention")
        copies = () if theirs[-2:] != ".0" else ("decoder.queries.reference.0",)
        yield NameRule((f"{theirs}.norm4",), (f"{ours}.cross_attention.norm",), copies=copies)


def _shared_heads() -> Iterator[NameRule]:
    yield rename("class_embed", "decoder.heads.classes.0")
    yield rename("bbox_embed", "decoder.heads.boxes.0")


def deformable_heads(layout: Layout, decoder: str) -> Iterator[NameRule]:
    """Heads in lists: one for each decoder layer (the same one without refinement), then the encoder's."""
    layers = range(layout.decoder_layers)
    for name, ours in (("class_embed", "classes"), ("bbox_embed", "boxes")):
        lists = [name]
        if layout.two_stage or (layout.refine and name == "bbox_embed"):
            lists.append(f"{decoder}.{name}")
        if not layout.refine:
            yield rename([f"{name}.{layer}" for layer in layers], f"decoder.heads.{ours}.0")
            continue
        for layer in layers:
            yield rename([f"{prefix}.{layer}" for prefix in lists], f"decoder.heads.{ours}.{layer}")
        head = "class_head" if name == "class_embed" else "box_head"
        yield rename([f"{prefix}.{layout.decoder_layers}" for prefix in lists], f"decoder.queries.{head}")


def _batch_former(layout: Layout, encoder: str) -> Iterator[NameRule]:
    """One module for all insertions, or one for each encoder layer, which the forks store twice."""
    names = [("shared", ["transformer.bf"], ["transformer.encoder.bf"])]
    names += [(str(i), [f"transformer.bf.{i}", f"transformer.encoder.bf.{i}"], []) for i in layout.batch_former_layers]
    for mixer, modules, older in names:
        for depth in range(layout.batch_former_depth):
            below = f".layers.{depth}" if layout.batch_former_depth > 1 else ""
            yield rename(
                [module + below for module in modules],
                f"{encoder}.batch_former.mixers.{mixer}.layers.{depth}",
                older=[module + below for module in older],
            )


def _encoder_layers(layout: Layout) -> Iterator[tuple[str, str]]:
    return _layers("encoder", layout.encoder_layers)


def _decoder_layers(layout: Layout) -> Iterator[tuple[str, str]]:
    return _layers("decoder", layout.decoder_layers)


def _layers(name: str, count: int, inside: str = "") -> Iterator[tuple[str, str]]:
    for layer in range(count):
        yield f"transformer.{name}.layers.{layer}", f"{inside}{name}.layers.{layer}"


def _feed_forward(theirs: str, ours: str, *, norm: str) -> Iterator[NameRule]:
    yield rename(f"{theirs}.linear1", f"{ours}.feed_forward.expand")
    yield rename(f"{theirs}.linear2", f"{ours}.feed_forward.contract")
    yield rename(f"{theirs}.activation", f"{ours}.feed_forward.activation")
    yield rename(f"{theirs}.{norm}", f"{ours}.feed_forward_residual.norm")


def _packed(theirs: str, ours: str) -> Iterator[NameRule]:
    """Yield the rules of torch's multi-head attention, with three projections in one matrix."""
    for kind in ("weight", "bias"):
        yield NameRule((f"{theirs}.in_proj_{kind}",), tuple(f"{ours}.{part}.{kind}" for part in PARTS))
    yield rename(f"{theirs}.out_proj", f"{ours}.out")


def deformable_attention(theirs: str, ours: str) -> Iterator[NameRule]:
    """Yield the rules of one deformable attention."""
    yield rename(f"{theirs}.sampling_offsets", f"{ours}.sampling_offsets")
    yield rename(f"{theirs}.attention_weights", f"{ours}.attention_weights")
    yield rename(f"{theirs}.value_proj", f"{ours}.value")
    yield rename(f"{theirs}.output_proj", f"{ours}.out")


def _with_resnet(rules: Iterable[NameRule], prefix: str, layout: Layout) -> Iterator[NameRule]:
    """Replace the backbone in ``rules`` by a ResNet of detectron2 in module ``prefix``."""
    yield from (rule for rule in rules if rule.ours != (BODY,))
    yield from _convolution(f"{prefix}.stem.conv1", "conv1", "bn1")
    for stage in range(1, 5):
        for block in range(layout.backbone_blocks):
            theirs, ours = f"{prefix}.res{stage + 1}.{block}", f"layer{stage}.{block}"
            yield from _convolution(f"{theirs}.shortcut", f"{ours}.downsample.0", f"{ours}.downsample.1")
            for number in range(1, 4):
                yield from _convolution(f"{theirs}.conv{number}", f"{ours}.conv{number}", f"{ours}.bn{number}")


def _convolution(theirs: str, convolution: str, norm: str) -> Iterator[NameRule]:
    """Rename a convolution that contains its norm."""
    yield rename(theirs, f"{BODY}.{convolution}")
    yield rename(f"{theirs}.norm", f"{BODY}.{norm}")


def official_rfdetr(layout: Layout) -> Iterator[NameRule]:
    """roboflow/rf-detr, without the token of masked patches and the mask of keypoints, which are not used."""
    attention = [f"attention.attention.{name}" for name in ("query", "key", "value")]
    yield from dinov2("backbone.0.encoder.encoder", (*attention, "attention.output.dense"))
    yield from _rfdetr_without_backbone(layout)
    block = {"dwconv": "depthwise", "norm": "norm", "pwconv1": "pointwise"}
    head = {
        "query_features_block.norm_in": "query_residual.norm",
        "query_features_block.layers.0": "query_mlp.layers.0",
    }
    head |= {"query_features_block.layers.2": "query_mlp.layers.1", "bias": "bias"}
    yield from within("segmentation_head", product_masks(layout, block, head))


def product_masks(layout: Layout, block: Mapping[str, str], head: Mapping[str, str]) -> Iterator[NameRule]:
    """Mask head of RF-DETR, by the foreign names of the parts of a block and of other parts but two."""
    for name, ours in {"spatial_features_proj": "project", "query_features_proj": "project_query", **head}.items():
        yield rename(name, f"mask_head.{ours}")
    for layer in range(layout.decoder_layers):
        for name, ours in block.items():
            yield rename(f"blocks.{layer}.{name}", f"mask_head.blocks.{layer}.{ours}")


def official_lwdetr(layout: Layout) -> Iterator[NameRule]:
    """Atten4Vis/LW-DETR, whose keys in the backbone have no bias, which would not change the attention."""
    vit, body = "backbone.0.encoder", f"{BODY}.vit"
    yield rename(f"{vit}.pos_embed", f"{body}.pos_embed")
    yield rename(f"{vit}.patch_embed", f"{body}.patch_embed")
    names = {name: name for name in ("norm1", "norm2", "mlp", "attn.proj")}
    names |= {"attn.qkv.weight": "attn.qkv.weight", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    for block in range(VIT_BLOCKS):
        theirs, ours = f"{vit}.blocks.{block}", f"{body}.blocks.{block}"
        biases = (f"{theirs}.attn.q_bias", "", f"{theirs}.attn.v_bias")
        yield NameRule(biases, (f"{ours}.attn.qkv.bias",), joined=True)
        for name, place in names.items():
            yield rename(f"{theirs}.{name}", f"{ours}.{place}")
    yield from _rfdetr_without_backbone(layout)


def _rfdetr_without_backbone(layout: Layout) -> Iterator[NameRule]:
    """Yield the rules of the projector, the queries and the decoder of RF-DETR and LW-DETR."""
    for level in range(RTDETR_LEVELS):
        theirs, ours = f"backbone.0.projector.stages.{level}", f"tokens.projections.{level}"
        yield rename(f"{theirs}.1", f"{ours}.norm")
        yield from bottlenecks(f"{theirs}.0", f"{ours}.block", "m", "cv", "bn")
        for number in range(VIT_MAPS):
            theirs, place = f"backbone.0.projector.stages_sampling.{level}.{number}", f"{ours}.resize.{number}"
            yield rename(theirs, place)
            yield from normed_convolution(f"{theirs}.0", f"{place}.0", (("conv", "0"), ("bn", "1")))
    yield from rfdetr_queries("transformer", ("query_feat", "refpoint_embed"))
    for theirs, ours in _decoder_layers(layout):
        yield from _decoder_layer(theirs, ours)
        yield rename(f"{theirs}.norm2", f"{ours}.cross_residual.norm")
    yield rename("transformer.decoder.norm", "decoder.norm")


def bottlenecks(theirs: str, ours: str, parts: str, convolution: str, norm: str) -> Iterator[NameRule]:
    """Block of the projector of RF-DETR, by the names of the bottlenecks, of convolutions from 1 on, and of a norm."""
    places = {f"{convolution}1": "enter", f"{convolution}2": "leave"}
    for index in range(BOTTLENECKS):
        places |= {f"{parts}.{index}.{convolution}{i + 1}": f"bottlenecks.{index}.{i}" for i in range(2)}
    for name, place in places.items():
        yield from normed_convolution(f"{theirs}.{name}", f"{ours}.{place}", (("conv", "0"), (norm, "1")))


def rfdetr_queries(model: str, learned: tuple[str, str]) -> Iterator[NameRule]:
    """Queries and heads of RF-DETR; ``learned``: names of the contents and of the changes of the boxes."""
    for name, ours in zip(learned, ("content", "change"), strict=True):
        yield rename(name, f"decoder.queries.{ours}")
    parts = {"output": "project", "output_norm": "norm", "out_class_embed": "class_head", "out_bbox_embed": "box_head"}
    for group in range(MOST_GROUPS):
        for name, ours in parts.items():
            yield rename(f"{model}.enc_{name}.{group}", f"decoder.queries.parts.{group}.{ours}")
    yield rename(f"{model}.decoder.ref_point_head", "decoder.update_queries.point")
    yield rename("class_embed", "decoder.heads.classes.0")
    yield rename("bbox_embed", "decoder.heads.boxes.0", older=["transformer.decoder.bbox_embed"])


def dinov2(vit: str, attention: Sequence[str]) -> Iterator[NameRule]:
    """DINOv2 of transformers as a network of timm, which has one matrix for query, key and value.

    Args:
        attention: names in a block of query, key, value and output.
    """
    body = f"{BODY}.vit"
    yield rename(f"{vit}.embeddings.cls_token", f"{body}.cls_token")
    yield rename(f"{vit}.embeddings.register_tokens", f"{body}.reg_token")
    yield rename(f"{vit}.embeddings.position_embeddings", f"{body}.pos_embed")
    yield rename(f"{vit}.embeddings.patch_embeddings.projection", f"{body}.patch_embed.proj")
    yield rename(f"{vit}.layernorm", f"{body}.norm")
    *parts, output = attention
    names = {output: "attn.proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for number in (1, 2):
        names |= {f"norm{number}": f"norm{number}", f"layer_scale{number}.lambda1": f"ls{number}.gamma"}
    for block in range(VIT_BLOCKS):
        theirs, ours = f"{vit}.encoder.layer.{block}", f"{body}.blocks.{block}"
        yield NameRule(tuple(f"{theirs}.{part}" for part in parts), (f"{ours}.attn.qkv",), joined=True)
        for name, place in names.items():
            yield rename(f"{theirs}.{name}", f"{ours}.{place}")
