"""Foreign checkpoint formats: detect, read and write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.text import listed, printable
from detr_bf.common.weights import without_wrapper
from detr_bf.interop import huggingface, official
from detr_bf.interop.huggingface import Table, own_resnet
from detr_bf.interop.rules import Layout, NameRule, to_ours, to_theirs, unknown_names

COUNTERS = ("total_params", "total_ops")  # of a profiler, in some released Deformable DETR files
OURS = ("backbone.body.", "tokens.", "decoder.queries.", "decoder.heads.")  # no foreign name starts like this


@dataclass(frozen=True)
class Format:
    """Names of one foreign implementation."""

    name: str
    rules: Callable[[Layout], Iterable[NameRule]]
    signs: tuple[str, ...]  # regular expressions of tensors or modules; a checkpoint of this format has all of them
    title: str
    wrapper: str | None = "model"  # key of the weights in a checkpoint ("ema.module": in ema); None: no other content
    ignored: tuple[str, ...] = COUNTERS  # suffixes of names that are neither read nor written
    own: bool = False  # our detectors under other names, with all their tensors

    def missing_signs(self, names: Iterable[str]) -> list[str]:
        text = "\n".join(names)
        return [sign for sign in self.signs if not re.search(rf"^{sign}(\.|$)", text, re.MULTILINE)]

    def table(self, state: Mapping[str, Tensor]) -> list[NameRule]:
        return list(self.rules(Layout.of(state)))

    def kept(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in state.items() if not name.endswith(self.ignored)}


def _hugging_face(name: str, rules: Table, signs: tuple[str, ...]) -> Iterator[Format]:
    """Yield the formats with timm's ResNet and with the library's own."""
    own = r"model\.backbone\.(conv_encoder\.)?model\.embedder"
    for suffix, title, table, more in (("", "", rules, ()), ("_no_timm", " without timm", own_resnet(rules), (own,))):
        yield Format(
            f"hf_{name}{suffix}",
            table,
            (*signs, *more),
            f"Hugging Face {name}{title}",
            wrapper=None,
            ignored=("num_batches_tracked",),  # its norms are frozen
        )


def _rtdetr() -> Iterator[Format]:
    """Yield the formats of both versions of RT-DETR, the authors' and Hugging Face's, and of D-FINE."""
    signs = ("decoder.dec_score_head.0", "encoder.fpn_blocks.0", "encoder.encoder.0.layers.0")
    buffers = ("decoder.anchors", "decoder.valid_mask")  # of one image size
    for name, rules, own in (
        ("rtdetr", official.official_rtdetr, ("encoder.input_proj.0.0", "decoder.enc_output.0")),
        ("rtdetrv2", official.official_rtdetrv2, ("encoder.input_proj.0.conv", _SCALE)),
    ):
        title = f"official {name.replace('rtdetr', 'RT-DETR')}"
        yield Format(name, rules, (*signs, *own), title, "ema.module", ignored=buffers)
    dfine = ("encoder.input_proj.0.conv", _SCALE, "decoder.pre_bbox_head", "decoder.decoder.lqe_layers.0")
    title = "official D-FINE or DEIM on it"
    yield Format("dfine", official.official_dfine, (*signs, *dfine), title, "ema.module", ignored=buffers)
    signs = ("model.encoder.fpn_blocks.0", r"model\.encoder\.(aifi|encoder)\.0\.layers\.0", "model.enc_score_head")
    scale = "model.decoder.layers.0.encoder_attn.n_points_scale"
    yield Format("hf_rtdetr", huggingface.hf_rtdetr, signs, "Hugging Face RT-DETR", None, ())
    yield Format("hf_rtdetrv2", huggingface.hf_rtdetrv2, (*signs, scale), "Hugging Face RT-DETRv2", None, ())
    own = ("model.decoder.pre_bbox_head", "model.decoder.lqe_layers.0")
    yield Format("hf_dfine", huggingface.hf_dfine, (*signs, *own), "Hugging Face D-FINE", None, ())


def _rfdetr() -> Iterator[Format]:
    """Yield the formats of RF-DETR and LW-DETR, the authors' and Hugging Face's."""
    signs = ("backbone.0.projector.stages.0.0.cv1", "transformer.enc_out_bbox_embed.0", "query_feat")
    unused = ("mask_token", "_kp_active_mask")
    yield Format("rfdetr", official.official_rfdetr, signs, "official RF-DETR", ignored=unused)
    sign = "backbone.0.encoder.blocks.0.attn.q_bias"
    yield Format("lwdetr", official.official_lwdetr, (*signs, sign), "official LW-DETR", ignored=())
    queries = ("model.enc_out_bbox_embed.0", "model.query_feat")
    sign = "model.backbone.projector.projector_layer"
    yield Format("hf_rfdetr", huggingface.hf_rfdetr, (*queries, sign), "Hugging Face RF-DETR", None, ("mask_token",))
    inner = (*(f"model.{each}" for each in (*queries, sign)), "segmentation_bias")
    title = "Hugging Face RF-DETR with a mask head"
    yield Format("hf_rfdetr_masks", huggingface.hf_rfdetr_masks, inner, title, None, ("mask_token",))
    own = ("model.backbone.projector.scale_layers.0.projector_layer", "model.backbone.backbone.encoder.layer.0.gamma_1")
    yield Format("hf_lwdetr", huggingface.hf_lwdetr, (*queries, *own), "Hugging Face LW-DETR", None, ())


def _detectron2() -> Iterator[Format]:
    """Yield the formats inside detectron2: our adapter's and official DETR's."""
    adapter = ("detector.decoder.queries", "detector.decoder.heads.classes")
    yield Format("detectron2", official.detectron2_adapter, adapter, "detr_bf in detectron2", own=True)
    yield Format(
        "detectron2_resnet",
        official.detectron2_adapter_resnet,
        (*adapter, "detector.backbone.body.stem.conv1"),
        "detr_bf in detectron2 with its ResNet",
        own=True,
    )
    for suffix, table, prefix, more in (
        ("", official.detectron2_detr, "detr", ()),
        ("_panoptic", official.detectron2_detr_panoptic, "detr.detr", ("detr.bbox_attention", "detr.mask_head")),
    ):
        yield Format(
            f"detr_detectron2{suffix}",
            table,
            (f"{prefix}.{_LAYER}.multihead_attn", f"{prefix}.backbone.0.backbone.stem", *more),
            f"official DETR in detectron2{' with a mask head' if more else ''}",
            ignored=(*COUNTERS, "criterion.empty_weight"),
        )


_LAYER = "transformer.decoder.layers.0"
_SCALE = "decoder.decoder.layers.0.cross_attn.num_points_scale"
_ATTENTION = "model.decoder.layers.0.encoder_attn"
FORMATS = (
    Format("detr", official.official_detr, (f"{_LAYER}.multihead_attn", "input_proj.weight"), "official DETR"),
    Format(
        "detr_panoptic",
        official.detr_panoptic,
        ("detr.transformer", "bbox_attention", "mask_head"),
        "official DETR with a mask head",
    ),
    Format(
        "conditional_detr",
        official.official_conditional_detr,
        (f"{_LAYER}.ca_qcontent_proj", "transformer.decoder.ref_point_head"),
        "official Conditional DETR",
    ),
    Format(
        "dab_detr",
        official.official_dab_detr,
        (f"{_LAYER}.ca_qcontent_proj", "transformer.decoder.ref_anchor_head", "refpoint_embed"),
        "official DAB-DETR or DN-DETR",
    ),
    Format(
        "smca", official.official_smca, (f"{_LAYER}.point1", f"{_LAYER}.point2", "input_proj.weight"), "official SMCA"
    ),
    Format(
        "smca_multi_scale",
        official.official_smca_multi_scale,
        (f"{_LAYER}.point1", f"{_LAYER}.point4", "input_proj_512"),
        "official multi-scale SMCA",
    ),
    Format(
        "deformable_detr",
        official.official_deformable_detr,
        (f"{_LAYER}.cross_attn.sampling_offsets", "transformer.level_embed", "input_proj.0.0"),
        "official Deformable DETR",
    ),
    Format(
        "dab_deformable_detr",
        official.official_dab_deformable_detr,
        (f"{_LAYER}.cross_attn.sampling_offsets", "transformer.level_embed", "tgt_embed", "refpoint_embed"),
        "official DAB-Deformable-DETR",
    ),
    Format(
        "dino",
        official.official_dino,
        (
            f"{_LAYER}.cross_attn.sampling_offsets",
            "transformer.level_embed",
            "transformer.decoder.ref_point_head",
            "transformer.enc_out_class_embed",
        ),
        "official DINO",
    ),
    *_rtdetr(),
    *_rfdetr(),
    *_hugging_face("detr", huggingface.hf_detr, (f"{_ATTENTION}.q_proj", "class_labels_classifier", "bbox_predictor")),
    *_hugging_face(
        "conditional_detr",
        huggingface.hf_conditional_detr,
        ("model.decoder.query_scale", "model.decoder.ref_point_head", "bbox_predictor"),
    ),
    *_hugging_face(
        "dab_detr",
        huggingface.hf_dab_detr,
        (
            "model.query_refpoint_embeddings",
            "model.decoder.query_scale",
            "model.decoder.ref_anchor_head",
            "bbox_predictor",
        ),
    ),
    *_hugging_face(
        "deformable_detr",
        huggingface.hf_deformable_detr,
        (f"{_ATTENTION}.sampling_offsets", "model.level_embed", r"(model\.decoder\.)?class_embed"),
    ),
    *_detectron2(),
)
NAMES = tuple(form.name for form in FORMATS)


def format_named(name: str) -> Format:
    """Return a format by name (InputError: unknown name)."""
    form = next((form for form in FORMATS if form.name == name), None)
    if form is None:
        raise InputError(f"no checkpoint format '{printable(name)}'; there are: {', '.join(NAMES)}")
    return form


def is_ours(state: Mapping[str, Tensor]) -> bool:
    """Return True if the names are those of our detectors."""
    return any(name.startswith(OURS) for name in state)


def format_of(state: Mapping[str, Tensor]) -> Format | None:
    """Return the format with the most signs among those with all signs present, or None."""
    complete = [form for form in FORMATS if not form.missing_signs(state)]
    return max(complete, key=lambda form: len(form.signs), default=None)


def closest_format(state: Mapping[str, Tensor]) -> str:
    """Describe for messages the formats tried, the one that knows most names, and the signs it misses."""
    unknown = {form: len(unknown_names(state, form.table(state))) for form in FORMATS}
    best = min(FORMATS, key=lambda form: (unknown[form], len(form.missing_signs(state))))
    closest = f"closest is {best.name}, which knows {len(state) - unknown[best]} of the {len(state)} names and misses "
    closest += ", ".join(best.missing_signs(state)).replace("\\", "")
    return f"tried: {', '.join(NAMES)}; {closest if unknown[best] < len(state) else 'none knows any of the names'}"


def from_foreign(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a foreign state dict under our names.

    Raises:
        InputError: unknown format, or an unknown name in a known format.
    """
    state = without_wrapper(state)
    form = format_of(state)
    if form is None:
        raise InputError(f"{source}: the names in it belong to no known format ({closest_format(state)})")
    kept = form.kept(state)
    ours, unknown = to_ours(kept, form.table(kept))
    if unknown:
        raise InputError(f"{source} looks like {form.title}, but these names are unknown there: {listed(unknown)}")
    return ours


def to_foreign(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return our state dict under the names of the format ``name``.

    Raises:
        InputError: unknown format, a tensor without a name in it, or tensors of the format are missing.
    """
    form = format_named(name)
    kept = form.kept(state)
    theirs, unknown = to_theirs(kept, form.table(kept))
    if unknown:
        hint = ". First write the detector without batch attention (--strip-batchformer), then convert the result"
        raise InputError(
            f"{form.title} has no names for these tensors: {listed(unknown)}"
            + (hint if any("batch_former" in tensor.split(".") for tensor in unknown) else "")
        )
    if missing := form.missing_signs(theirs):
        raise InputError(f"these are not the weights of a whole {form.title} detector: {', '.join(missing)} is missing")
    return theirs
