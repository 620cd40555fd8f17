"""Folders of Hugging Face transformers: written from a detector after a comparison of outputs, and read.

transformers is imported when a folder is written or read, and is needed for nothing else.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from detr_bf.backbones import HGNETS
from detr_bf.backbones.backbone import MEAN, STD
from detr_bf.batchformer.modes import EVALUATED_MODES
from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, make_output_folder, read_json_object
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.text import listed, printable
from detr_bf.detectors import Detector
from detr_bf.interop.classes import coco_classes
from detr_bf.interop.formats import NAMES, format_named, to_foreign
from detr_bf.interop.weights import write_weights

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[0-9]{1,9}")
_CATEGORY_IDS = "detr_bf_category_ids"  # key of our own in config.json
TRANSFORMERS_FILES = ("model.safetensors", "config.json", "preprocessor_config.json")
OUTPUT_TOLERANCE = 1e-4  # of the largest output, float32
_SIZE = 256, 320  # pixels of the image of the comparison
_NAMES = {  # our detector: their classes, model_type, image processor
    "detr": ("Detr", "detr", "DetrImageProcessor"),
    "conditional_detr": ("ConditionalDetr", "conditional_detr", "ConditionalDetrImageProcessor"),
    "dab_detr": ("DabDetr", "dab-detr", "ConditionalDetrImageProcessor"),
    "deformable_detr": ("DeformableDetr", "deformable_detr", "DeformableDetrImageProcessor"),
    "rtdetr": ("RTDetr", "rt_detr", "RTDetrImageProcessor"),
    "rtdetrv2": ("RTDetrV2", "rt_detr_v2", "RTDetrImageProcessor"),
    "dfine": ("DFine", "d_fine", "RTDetrImageProcessor"),
}
_HYBRID = ("rtdetr", "rtdetrv2", "dfine")  # hybrid encoder, images of colours from 0 to 1
_SETTINGS = {  # theirs: ours, of all detectors
    "num_queries": "num_queries",
    "decoder_layers": "decoder_layers",
    "encoder_layers": "encoder_layers",
    "decoder_ffn_dim": "feedforward_dim",
    "encoder_attention_heads": "heads",
}
_DEFORMABLE = {
    "encoder_n_points": "encoder_points",
    "decoder_n_points": "decoder_points",
    "with_box_refine": "box_refine",
    "two_stage": "two_stage",
}
_RESNETS_VD = {
    "resnet18vd": ("basic", (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34vd": ("basic", (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50vd": ("bottleneck", (256, 512, 1024, 2048), (3, 4, 6, 3)),
    "resnet101vd": ("bottleneck", (256, 512, 1024, 2048), (3, 4, 23, 3)),
}
# theirs: ours, in model.rtdetr and model.dfine, and in model.dfine alone
_HYBRID_OWN = {"hidden_expansion": "expansion", "learn_initial_query": "learned_content"}
_DFINE_OWN = {"max_num_bins": "reg_max", "reg_scale": "reg_scale", "up": "up"}
_BACKBONES = {"rtdetr": _RESNETS_VD, "rtdetrv2": _RESNETS_VD, "dfine": HGNETS}  # with names of their weights
_ONLY_OF_DFINE: dict[str, Any] = {  # settings of model.dfine with one value in transformers
    "attention_levels": [],
    "eval_layer": None,
    "layer_scale": 1,
    "selection": "tokens",
    "head_activation": "relu",
}
_ONLY_OF_HYBRID = {  # settings of transformers with one value here
    "encoder_activation_function": "gelu",
    "activation_function": "silu",
    "normalize_before": False,
    "layer_norm_eps": 1e-5,
    "batch_norm_eps": 1e-5,
    "decoder_offset_scale": 0.5,
    "top_prob_values": 4,
    "lqe_hidden_dim": 64,
    "lqe_layers": 2,
    "layer_scale": 1,
}
_HGNET_STAGES = (  # theirs, in the order of timm's description of a stage
    "stage_in_channels",
    "stage_mid_channels",
    "stage_out_channels",
    "stage_num_blocks",
    "stage_downsample",
    "stage_light_block",
    "stage_kernel_size",
    "stage_numb_of_layers",
)


def transformers_library() -> Any:
    """Import transformers (InputError: it is not installed)."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"folders of transformers need the package: pip install 'detr_bf[hub]' ({error})") from error
    return transformers


def write_transformers_folder(
    folder: Path, detector: Detector, classes: ClassMap, config: Mapping[str, Any]
) -> list[str]:
    """Write the folder that ``from_pretrained`` of transformers reads, without batch attention.

    It is written beside its place first, read by transformers and compared on a random image.

    Args:
        detector: in evaluation mode.
        config: settings of the run, as a checkpoint stores them.

    Returns:
        The names of the tensors of batch attention that were left out.

    Raises:
        InputError: transformers has no such detector, its outputs differ, or a file exists or cannot be written.
    """
    library, name = transformers_library(), config["model"]["name"]
    if name not in _NAMES:
        more = f"; detr-bf convert --to hf_{name} writes its weights" if f"hf_{name}" in NAMES else ""
        raise InputError(f"{name} cannot be written as a folder of transformers, only {listed(_NAMES, 10)}{more}")
    mode = config["batch_former"]["mode"]
    if config["batch_former"]["enabled"] and mode in EVALUATED_MODES:
        raise InputError(f"batch_former.mode={mode} uses batch attention in evaluation; transformers does not")
    if config["model"]["backbone"].get("reference", "none") != "none":
        raise InputError("model.backbone.reference: transformers' detectors see no reference")
    if config["data"].get("mean"):
        raise InputError("data.mean and data.std: a folder of transformers has those of the backbone, not of a run")
    for file in TRANSFORMERS_FILES:
        if (folder / file).exists() or (folder / file).is_symlink():
            raise InputError(f"{printable(folder / file)} exists: give a new folder")
    state = detector.state_dict()
    left_out = [key for key in state if not {"batch_former", "relative_localization"}.isdisjoint(key.split("."))]
    counters = [key for key in state if key.startswith("backbone.") and key.endswith("num_batches_tracked")]
    kept = {key: value.cpu() for key, value in state.items() if key not in {*left_out, *counters}}
    form = f"hf_{name}"
    model_class = getattr(library, f"{_NAMES[name][0]}ForObjectDetection")
    their_config = _their_config(library, config, classes)
    _check_shapes(model_class, their_config, to_foreign(kept, form), format_named(form).title)
    make_output_folder(folder, "folder")
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as name_of_folder:
        unfinished = Path(name_of_folder)
        their_config.save_pretrained(unfinished)
        _image_processor(library, config).save_pretrained(unfinished)
        write_weights(unfinished / TRANSFORMERS_FILES[0], kept, form)
        theirs = model_class.from_pretrained(unfinished).eval()
        _compare(detector, theirs, normalised=name not in _HYBRID)
        for file in TRANSFORMERS_FILES:
            (unfinished / file).replace(folder / file)
    return left_out


def _their_config(library: Any, config: Mapping[str, Any], classes: ClassMap) -> Any:
    """Return the configuration object of transformers (InputError: it has no such detector)."""
    model, name, backbone = config["model"], config["model"]["name"], config["model"]["backbone"]["name"]
    if name in _BACKBONES and backbone not in _BACKBONES[name]:
        raise InputError(
            f"{name} on {backbone} cannot be written for transformers: only on {', '.join(_BACKBONES[name])}"
        )
    labels = dict(enumerate(classes.names))
    shared: dict[str, Any] = {
        "id2label": labels,
        "label2id": {label: number for number, label in labels.items()},
        "num_labels": len(labels),
        _CATEGORY_IDS: list(classes.category_ids),
        **{theirs: model[ours] for theirs, ours in _SETTINGS.items()},
        "encoder_ffn_dim": model["feedforward_dim"],
        "decoder_attention_heads": model["heads"],
        "backbone_config": _their_backbone(library, name, model["backbone"]),
        ("hidden_size" if name == "dab_detr" else "d_model"): model["hidden_dim"],
    }
    own: dict[str, Any] = {}
    if name == "deformable_detr":
        own = {theirs: model["deformable"][ours] for theirs, ours in _DEFORMABLE.items()}
        own["num_feature_levels"] = len(model["backbone"]["strides"]) + model["extra_levels"]
        own["two_stage_num_proposals"] = model["num_queries"]
        if own["with_box_refine"]:
            own["tie_word_embeddings"] = False
    elif name == "dab_detr":
        temperature = int(model["position_temperature"])
        own = {"num_patterns": model["dab"]["patterns"], "activation_function": model["activation"]}
        own |= {"temperature_height": temperature, "temperature_width": temperature}
    elif name in _HYBRID:
        own = _hybrid_settings(model) | (_dfine_settings(model) if name == "dfine" else _rtdetr_settings(model))
    if name in ("detr", "conditional_detr", "deformable_detr"):
        own["position_embedding_type"] = model["position_encoding"]
    if name not in (*_HYBRID, "dab_detr"):
        own["activation_function"] = model["activation"]
    return getattr(library, f"{_NAMES[name][0]}Config")(**(shared | own))


def _hybrid_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that RT-DETR and D-FINE share (InputError: transformers does not have one of them)."""
    group = "dfine" if model["name"] == "dfine" else "rtdetr"
    own = model[group]
    if own["as_released"]:
        raise InputError(f"transformers computes positions as model.{group}.as_released=false does: set it to false")
    width, strides = own["encoder_dim"] or model["hidden_dim"], model["backbone"]["strides"]
    return {
        "encoder_hidden_dim": width,
        "encoder_ffn_dim": own["encoder_feedforward_dim"] or model["feedforward_dim"],
        "decoder_in_channels": [width] * len(strides),
        "num_denoising": model["denoising"]["queries"],
        "decoder_method": "discrete" if own["sampling"] == "discrete" else "default",
        **{theirs: own[ours] for theirs, ours in _HYBRID_OWN.items()},
        "positional_encoding_temperature": int(model["position_temperature"]),
        "decoder_activation_function": model["activation"],
    }


def _rtdetr_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    channels = list(_RESNETS_VD[model["backbone"]["name"]][1][1:])
    return {"encoder_in_channels": channels, "decoder_n_points": model["rtdetr"]["points"][0]}


def _dfine_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of D-FINE alone (InputError: transformers has only one value of a setting, and not this)."""
    own, strides = model["dfine"], list(model["backbone"]["strides"])
    if other := [f"{name}={own[name]}" for name, value in _ONLY_OF_DFINE.items() if own[name] != value]:
        raise InputError(f"transformers has no D-FINE with model.dfine.{listed(other)}")
    return {
        "encoder_in_channels": _hgnet(model["backbone"]["name"])["stage_out_channels"][-len(strides) :],
        "encode_proj_layers": [len(strides) - 1],
        "feat_strides": strides,
        "num_feature_levels": len(strides),
        "depth_mult": own["fusion_blocks"] / 3,
        "decoder_n_points": own["points"] * len(strides) if len(own["points"]) == 1 else own["points"],
        **{theirs: own[ours] for theirs, ours in _DFINE_OWN.items()},
    }


def _hgnet(name: str) -> dict[str, list[Any]]:
    """Return the layers of ``hgnetv2_b0`` to ``hgnetv2_b6`` by the names of transformers, as timm describes them."""
    from timm.models.hgnet import model_cfgs

    layers = model_cfgs[name]
    stages = zip(*(layers[f"stage{number}"] for number in (1, 2, 3, 4)), strict=True)
    return {"stem_channels": [3, *layers["stem_chs"]], **dict(zip(_HGNET_STAGES, map(list, stages), strict=True))}


def _their_backbone(library: Any, detector: str, backbone: Mapping[str, Any]) -> Any:
    """Return the configuration of the backbone: timm's ResNet, or transformers' ResNet-vd, or HGNetv2 for D-FINE.

    Raises:
        InputError: transformers has no such network.
    """
    name = backbone["name"]
    if name in _RESNETS_VD:
        kind, sizes, depths = _RESNETS_VD[name]
        stages = ["stage2", "stage3", "stage4"]
        return library.RTDetrResNetConfig(
            layer_type=kind, hidden_sizes=list(sizes), depths=list(depths), out_features=stages
        )
    if detector == "dfine":
        described = _hgnet(name)
        return library.HGNetV2Config(
            **described,
            hidden_sizes=described["stage_out_channels"],
            use_learnable_affine_block=name in HGNETS[:4],
            out_features=["stage1", "stage2", "stage3", "stage4"][-len(backbone["strides"]) :],
        )
    if not name.startswith("resnet") or backbone["dilation"]:
        raise InputError(
            f"a backbone {name}{' with dilation' if backbone['dilation'] else ''} cannot be written for transformers: "
            "only ResNets without dilation"
        )
    levels = tuple(int(math.log2(stride)) - 1 for stride in backbone["strides"])
    return library.TimmBackboneConfig(backbone=name, out_indices=levels, use_pretrained_backbone=False)


def _image_processor(library: Any, config: Mapping[str, Any]) -> Any:
    """Return the preprocessing of transformers: resizing as in our evaluation, and normalisation."""
    transforms, name = config["data"]["transforms"], config["model"]["name"]
    side = transforms["square"]
    if not side and transforms.get("size_divisor", 1) != 1:
        logger.warning(
            "transformers does not round resized sides to multiples of the coarsest stride, as this detector was "
            "trained (data.transforms.size_divisor): give it images of such sizes, or boxes shift"
        )
    size = (
        {"height": side, "width": side}
        if side
        else {"shortest_edge": transforms["eval_short_side"], "longest_edge": transforms["max_size"]}
    )
    more = {"do_normalize": False} if name in _HYBRID else {"image_mean": list(MEAN), "image_std": list(STD)}
    return getattr(library, _NAMES[name][2])(size=size, **more)


def _check_shapes(model_class: Any, their_config: Any, state: Mapping[str, Tensor], title: str) -> None:
    """Compare names and shapes with those of their model.

    Raises:
        InputError: they differ, as with settings that transformers does not have.
    """
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in model_class(their_config).state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    expected = {key: shape for key, shape in expected.items() if not key.endswith("num_batches_tracked")}
    other = sorted(key for key in {**found, **expected} if found.get(key) != expected.get(key) and key in expected)
    if other:
        raise InputError(
            f"{title} of transformers has no such detector: other tensors in {listed(other)}. Settings such as "
            "model.groups, model.masks, pre_norm or another loss.classification are not known there"
        )


@torch.no_grad()
def _compare(detector: Detector, theirs: nn.Module, *, normalised: bool) -> None:
    """Compare both detectors on a random image (InputError: scores or boxes differ)."""
    device = next(detector.parameters()).device
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 3, *_SIZE), generator=generator, dtype=torch.uint8)
    ours = detector(Batch(image, torch.zeros(1, *_SIZE, dtype=torch.bool)).to(device))
    pixels = image / 255
    if normalised:
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        pixels = (pixels - mean) / std
    found = theirs(pixel_values=pixels)
    logits, boxes = ours.logits[-1].cpu(), ours.boxes[-1].cpu()
    finite = all(bool(it.isfinite().all()) for it in (logits, boxes, found.logits, found.pred_boxes))
    if ours.proposals is not None and finite and logits.shape == found.logits.shape:
        logits, boxes = in_order_of((found.logits, found.pred_boxes), logits, boxes)
    for kind, one, other in (("class logits", logits, found.logits), ("boxes", boxes, found.pred_boxes)):
        off = (one - other).abs().max().item() if one.shape == other.shape else math.inf
        if not off <= OUTPUT_TOLERANCE * max(1.0, other.abs().max().item()):
            raise InputError(
                f"transformers gives other {kind} with these weights (largest difference {off:.2g}), so nothing was "
                "written: it has not all settings of this detector"
            )


def in_order_of(reference: tuple[Tensor, Tensor], logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (B, Q, K) and boxes (B, Q, 4) in the order of queries in which they are closest to ``reference``.

    The best tokens that a detector takes as queries come in an order that rounding changes where two are equally good.
    """
    distance = torch.cdist(torch.cat([*reference], -1).float(), torch.cat([logits, boxes], -1).float(), p=torch.inf)
    order = torch.stack([torch.from_numpy(linear_sum_assignment(image)[1]) for image in distance.cpu().numpy()])
    rows = torch.arange(len(order))[:, None]
    return logits[rows, order], boxes[rows, order]


def read_transformers_config(folder: Path) -> tuple[str, list[str], ClassMap]:
    """Return the name of a recipe, settings that replace its own, and the classes of a folder of transformers.

    Category ids are those that :func:`write_transformers_folder` stored, COCO's for the names of its 80 classes in
    order, or else the numbers of the classes in the folder. Entries of COCO's unused ids, called ``N/A``, stay.

    Raises:
        InputError: the folder is damaged, or of a model that is not here.
    """
    names = {model_type: name for name, (_, model_type, _) in _NAMES.items()}
    model_type = read_json_object(folder / TRANSFORMERS_FILES[1]).get("model_type")
    if model_type not in names:
        raise InputError(
            f"{printable(folder)} holds a model '{printable(model_type)}' of transformers; known are {', '.join(names)}"
        )
    name, library = names[model_type], transformers_library()
    try:
        found = library.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise almost anything
        raise InputError(
            f"{printable(folder)}: transformers cannot read config.json ({printable(error)}): get the folder again"
        ) from error
    classes = _classes(folder, found.id2label, getattr(found, _CATEGORY_IDS, None))
    recipe = "dfine_l" if name == "dfine" else f"{name}_r50"
    return recipe, _our_settings(name, found, read_json_object(folder / TRANSFORMERS_FILES[2])), classes


def transformers_classes(folder: Path) -> ClassMap | None:
    """Return the classes as :func:`read_transformers_config` does, without transformers; None: there are no labels.

    Raises:
        InputError: the category ids are not as many different numbers as there are labels.
    """
    content = read_json_object(folder / TRANSFORMERS_FILES[1])
    labels = content.get("id2label")
    if not isinstance(labels, dict) or not labels or not all(_NUMBER.fullmatch(number) for number in labels):
        return None
    return _classes(folder, {int(number): label for number, label in labels.items()}, content.get(_CATEGORY_IDS))


def _classes(folder: Path, id2label: Mapping[int, str], stored: Any) -> ClassMap:
    labels = sorted(id2label.items())
    classes = ClassMap(tuple(int(number) for number, _ in labels), tuple(str(label) for _, label in labels))
    if stored is not None:
        numbers = isinstance(stored, list) and all(type(each) is int for each in stored)
        if not numbers or not len({*stored}) == len(stored) == len(labels):
            raise InputError(f"{printable(folder)}: {_CATEGORY_IDS} of config.json are not {len(labels)} different ids")
        return replace(classes, category_ids=tuple(stored))
    coco = coco_classes()
    return coco if classes.names == coco.names else classes


def _our_settings(name: str, found: Any, processing: Mapping[str, Any]) -> list[str]:
    """Return our settings for a configuration of transformers."""
    values: dict[str, Any] = {ours: getattr(found, theirs) for theirs, ours in _SETTINGS.items()}
    values["hidden_dim"] = found.hidden_size if name == "dab_detr" else found.d_model
    if name in ("detr", "conditional_detr", "deformable_detr"):
        values["position_encoding"] = found.position_embedding_type
    if name == "dab_detr":
        values |= {"dab.patterns": found.num_patterns, "position_temperature": found.temperature_height}
    if name == "deformable_detr":
        values |= {f"deformable.{ours}": getattr(found, theirs) for theirs, ours in _DEFORMABLE.items()}
        if found.two_stage:
            values["num_queries"] = found.two_stage_num_proposals
    if name in _HYBRID:
        values |= _our_hybrid(name, found)
    if name == "dfine":
        values |= {
            **{f"dfine.{ours}": getattr(found, theirs) for theirs, ours in _DFINE_OWN.items()},
            "dfine.fusion_blocks": round(3 * found.depth_mult),
            "backbone.strides": list(found.feat_strides),
        }
    values |= _our_backbone(name, found)
    written = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return [*(f"model.{key}={value}" for key, value in written.items()), *_our_sizes(processing)]


def _our_hybrid(name: str, found: Any) -> dict[str, Any]:
    """Return the settings of RT-DETR or D-FINE (InputError: one has a value that is not here)."""
    last = [len(found.feat_strides) - 1]
    wrong = [
        f"{key}={getattr(found, key)}" for key, only in _ONLY_OF_HYBRID.items() if getattr(found, key, only) != only
    ]
    wrong += [] if list(found.encode_proj_layers) == last else [f"encode_proj_layers={found.encode_proj_layers}"]
    if name == "dfine" and found.eval_idx % found.decoder_layers != found.decoder_layers - 1:
        wrong.append(f"eval_idx={found.eval_idx}")
    if wrong:
        raise InputError(f"no {name} has the settings {printable(listed(wrong))} of config.json")
    own = "dfine" if name == "dfine" else "rtdetr"
    points = [found.decoder_n_points] if isinstance(found.decoder_n_points, int) else found.decoder_n_points
    return {
        f"{own}.encoder_dim": found.encoder_hidden_dim,
        f"{own}.encoder_feedforward_dim": found.encoder_ffn_dim,
        f"{own}.points": list(points),
        **{f"{own}.{ours}": getattr(found, theirs) for theirs, ours in _HYBRID_OWN.items()},
        f"{own}.sampling": "discrete" if getattr(found, "decoder_method", "") == "discrete" else "bilinear",
        "position_temperature": found.positional_encoding_temperature,
        "activation": found.decoder_activation_function,
    }


def _our_backbone(name: str, found: Any) -> dict[str, Any]:
    """Return the settings of the backbone (InputError: it is neither a ResNet nor HGNetv2)."""
    body = found.backbone_config or SimpleNamespace(backbone=found.backbone, model_type="timm_backbone")
    if name == "dfine":
        for size in HGNETS:
            if all(list(getattr(body, key, ())) == value for key, value in _hgnet(size).items()):
                return {"backbone.name": size}
        raise InputError("the backbone is none of hgnetv2_b0 to hgnetv2_b6")
    if name.startswith("rtdetr"):
        shape = (body.layer_type, tuple(body.hidden_sizes), tuple(body.depths))
        known = {value: key for key, value in _RESNETS_VD.items()}
        if shape not in known:
            raise InputError(f"no ResNet-vd has blocks '{printable(shape[0])}', {shape[1]}, {shape[2]}")
        return {"backbone.name": known[shape]}
    depths: dict[Sequence[int], str] = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (2, 2, 2, 2): "resnet18"}
    body_name = getattr(body, "backbone", None) or depths.get(tuple(getattr(body, "depths", ())), "")
    if not str(body_name).startswith("resnet"):
        raise InputError(f"the backbone '{printable(body_name or body.model_type)}' is not a ResNet")
    dilated = bool(getattr(found, "dilation", False))
    settings: dict[str, Any] = {"backbone.name": body_name, "backbone.dilation": dilated}
    if name != "deformable_detr":
        return settings | {"backbone.strides": "[16]" if dilated else "[32]"}
    if found.num_feature_levels == 1:
        return settings | {"backbone.strides": "[16]" if dilated else "[32]", "extra_levels": 0}
    return settings | {"extra_levels": found.num_feature_levels - 3}


def _our_sizes(processing: Mapping[str, Any]) -> list[str]:
    """Return the sizes of evaluation; those of the recipe stay if the folder says nothing."""
    size = processing.get("size")
    if not isinstance(size, Mapping):
        return []
    if size.get("height") and size.get("height") == size.get("width"):
        return [f"data.transforms.square={int(size['height'])}"]
    if size.get("shortest_edge") and size.get("longest_edge"):
        short, long = int(size["shortest_edge"]), int(size["longest_edge"])
        return [f"data.transforms.eval_short_side={short}", f"data.transforms.max_size={long}"]
    return []
