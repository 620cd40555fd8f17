"""Published weights by name: where they are, for which recipe, under which licence, and their download.

Every row is from the README or ``hubconf.py`` of the authors' repository, from a page of the Hugging Face Hub, or from
transformers' documentation (RF-DETR-Base). A SHA-256 is that of the source: the eight digits in DETR's file names, or
the whole hash on a page of the Hub; None means that none is stated. The Hub states the hash of every file in the answer
to its download, and it is compared there.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from detr_bf.common.errors import InputError
from detr_bf.common.files import cache_folder, is_file, is_folder, read_json_object
from detr_bf.common.text import printable
from detr_bf.interop.downloads import download_file
from detr_bf.interop.hub import hub_folder, is_hub_address

_SAVED = "model.safetensors"  # of a saved detector, and of transformers
HUB = "https://huggingface.co"
_DC5 = ("model.backbone.dilation=true", "model.backbone.strides=[16]")
_R101, _R101VD = ("model.backbone.name=resnet101",), ("model.backbone.name=resnet101vd",)
_R34VD = ("model.backbone.name=resnet34vd", "model.decoder_layers=4")
_R50_M = ("model.rtdetr.expansion=0.5",)
_R101_WIDE = (*_R101VD, "model.rtdetr.encoder_dim=384", "model.rtdetr.encoder_feedforward_dim=2048")
_LWDETR = ("tiny", "small", "medium", "large", "xlarge")
_RFDETR = ("nano", "small", "base", "large")
_DISCRETE = ("model.rtdetr.sampling=discrete",)


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a detector trained on COCO that others have published."""

    name: str
    recipe: str  # of detr_bf.list_models
    settings: tuple[str, ...]  # in which the detector differs from the recipe
    source: str  # page of the file
    url: str  # of the file; "": only a person can get it, from the page
    licence: str  # of the repository, as the Hugging Face Hub abbreviates it; "": not stated
    sha256: str | None = None  # hexadecimal, or its beginning
    megabytes: float | None = None  # as the source states it

    @property
    def file(self) -> str:
        """Name of the file in the cache and on a mirror."""
        if self.url.endswith("/model.safetensors"):
            return f"{self.source.removeprefix(HUB).strip('/').replace('/', '--')}.safetensors"
        return self.url.rsplit("/", 1)[-1] or f"{self.name}.pth"

    @property
    def path(self) -> Path:
        """File in the cache; it may be missing."""
        return cache_folder("weights") / self.file


def list_weights(pattern: str = "*") -> list[str]:
    """Return the sorted names of published weights that match ``pattern``, such as ``"detr_r50*"``.

    The names can be used as ``init_from``, in :func:`detr_bf.load` and in ``detr-bf convert``.
    """
    return sorted(name for name in _TABLE if fnmatch.fnmatch(name, pattern))


def published(name: str) -> PublishedWeights | None:
    """Return the row of the table, None for an unknown name."""
    return _TABLE.get(name)


def published_source(given: str) -> PublishedWeights | None:
    """Return the row of published weights that a setting such as ``init_from`` names, or whose file in the cache it is.

    A file or folder of that name is not meant by the row's name, as in :func:`find_weights`.
    """
    path = Path(given).expanduser()
    if is_file(path) or is_folder(path):
        return next((row for row in _TABLE.values() if is_file(row.path) and path.samefile(row.path)), None)
    return published(given)


def published_for(recipe: str) -> PublishedWeights | None:
    """Return the published weights of the detector of a recipe, None if there are none.

    Those of a recipe with batch attention are those of the detector without it.
    """
    plain = recipe.removesuffix("_bfv2")
    rows = [row for row in _TABLE.values() if row.recipe == plain and not row.settings]
    return max(rows, key=lambda row: (bool(row.url), row.name == plain, row.name), default=None)


def get_published(weights: PublishedWeights, patience: float | None = None) -> Path:
    """Return the file of published weights, downloaded into the cache if it is not there.

    With $DETR_BF_MIRROR it comes from that address, under its name in the cache; with $HF_ENDPOINT files of the
    Hugging Face Hub come from there.

    Args:
        patience: as in :func:`~detr_bf.interop.downloads.download_file`; the caller then says what to do without them.

    Raises:
        InputError: see :func:`detr_bf.interop.downloads.download_file`; or the weights can be got only by hand and are
            missing.
    """
    path, mirror = weights.path, os.environ.get("DETR_BF_MIRROR", "").rstrip("/")
    if not weights.url and not mirror:
        if is_file(path):
            return path
        raise InputError(
            f"the weights {weights.name} cannot be downloaded by a program: get them from {weights.source} (licence: "
            f"{weights.licence or 'not stated'}) and save the file as {printable(path)}"
        )
    hub = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    url = f"{mirror}/{weights.file}" if mirror else weights.url.replace(HUB, hub, 1)
    advice = (
        ""
        if patience is not None
        else (
            f" Otherwise download {weights.url or f'the file from {weights.source}'} elsewhere and save it as "
            f"{printable(path)}, or set DETR_BF_MIRROR to a web folder with a file {weights.file}"
        )
    )
    return download_file(url, path, sha256=weights.sha256 or "", advice=advice, patience=patience)


def is_transformers_folder(folder: Path) -> bool:
    """Return True for a folder whose config.json is of transformers."""
    return isinstance(read_json_object(folder / "config.json").get("model_type"), str)


def find_weights(given: str | Path) -> Path:
    """Return the file or folder that ``init_from`` and similar settings mean.

    It is an existing file or folder, else published weights or a folder on the Hugging Face Hub (``hf://user/name``),
    which are downloaded. Of a saved detector or a folder of transformers it is the file of the weights. What does not
    exist is returned as it is, for its reader to report.

    Raises:
        InputError: the download failed, or the name resembles one of :func:`list_weights`.
    """
    path, name = Path(given).expanduser(), str(given)
    if is_hub_address(name):
        path = hub_folder(name)
    if is_file(path / _SAVED) and is_file(path / "config.json"):
        return path / _SAVED
    if is_transformers_folder(path):
        raise InputError(
            f"{printable(path)}, a folder of transformers, has no file {_SAVED}: save the model in that form"
        )
    if is_file(path) or is_folder(path):
        return path
    if weights := published(name):
        return get_published(weights)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not path.suffix:
        near = difflib.get_close_matches(name, _TABLE, n=3, cutoff=0.7)
        if near:
            raise InputError(
                f"{printable(name)} is neither a file or folder nor the name of published weights; nearest names: "
                f"{', '.join(near)}. 'detr-bf recipes --weights' lists all {len(_TABLE)}"
            )
    return path


def _detr() -> Iterator[PublishedWeights]:
    page, base = "https://github.com/facebookresearch/detr", "https://dl.fbaipublicfiles.com/detr"
    for name, digits, megabytes, recipe, settings in (
        ("r50", "e632da11", 159, "detr_r50", ()),
        ("r50-dc5", "f0fb7ef5", 159, "detr_r50", _DC5),
        ("r101", "2c7b67e5", 232, "detr_r50", _R101),
        ("r101-dc5", "a2e86def", 232, "detr_r50", (*_R101, *_DC5)),
        ("r50-panoptic", "00ce5173", 165, "panoptic_detr_r50", ()),
        ("r50-dc5-panoptic", "da08f1b1", 165, "panoptic_detr_r50", _DC5),
        ("r101-panoptic", "40021d53", 237, "panoptic_detr_r50", _R101),
    ):
        url = f"{base}/detr-{name}-{digits}.pth"
        short = f"detr_{name.replace('-', '_')}"
        yield PublishedWeights(short, recipe, settings, page, url, "apache-2.0", digits, megabytes)


def _conditional_detr() -> Iterator[PublishedWeights]:
    page = "https://github.com/Atten4Vis/ConditionalDETR"
    base = "https://github.com/DeppMeng/ConditionalDETR/releases/download/v1.0/ConditionalDETR"
    for name, file, settings in (
        ("r50", "r50", ()),
        ("r50_dc5", "r50dc5", _DC5),
        ("r101", "r101", _R101),
        ("r101_dc5", "r101dc5", (*_R101, *_DC5)),
    ):
        url = f"{base}_{file}_epoch50.pth"
        yield PublishedWeights(f"conditional_detr_{name}", "conditional_detr_r50", settings, page, url, "apache-2.0")


def _h_deformable_detr() -> Iterator[PublishedWeights]:
    page = "https://github.com/HDETR/H-Deformable-DETR"
    base, plain = f"{page}/releases/download/v0.1", "deformable_detr_plus_iterative_bbox_refinement_plus_plus_two_stage"
    without = ("model.groups.one_to_many.queries=0",)
    simple = (*without, "model.deformable.mixed_selection=false", "model.deformable.look_forward_twice=false")
    for name, prefix, settings in (
        ("h_deformable_detr_r50", "r50_hybrid_branch_lambda1_group6_t1500_dp0_mqs_lft_", ()),
        ("deformable_detr_r50_two_stage_tricks", "r50_dp0_mqs_lft_", without),
        ("deformable_detr_r50_two_stage_hdetr", "r50_", simple),
    ):
        for epochs in (12, 36):
            url = f"{base}/{prefix}{plain}_{epochs}eps.pth"
            row = f"{name}_{epochs}ep"
            yield PublishedWeights(row, "h_deformable_detr_r50", settings, page, url, "mit")


def _rtdetr() -> Iterator[PublishedWeights]:
    page, base = "https://github.com/lyuwenyu/RT-DETR", "https://github.com/lyuwenyu/storage/releases/download"
    for name, recipe, settings, file in (
        ("rtdetr_r18", "rtdetr_r18", (), "v0.1/rtdetr_r18vd_dec3_6x_coco_from_paddle.pth"),
        ("rtdetr_r34", "rtdetr_r18", _R34VD, "v0.1/rtdetr_r34vd_dec4_6x_coco_from_paddle.pth"),
        ("rtdetr_r50_m", "rtdetr_r50", _R50_M, "v0.1/rtdetr_r50vd_m_6x_coco_from_paddle.pth"),
        ("rtdetr_r50", "rtdetr_r50", (), "v0.1/rtdetr_r50vd_6x_coco_from_paddle.pth"),
        ("rtdetr_r101", "rtdetr_r50", _R101_WIDE, "v0.1/rtdetr_r101vd_6x_coco_from_paddle.pth"),
        ("rtdetr_r18_o365", "rtdetr_r18", (), "v0.1/rtdetr_r18vd_5x_coco_objects365_from_paddle.pth"),
        ("rtdetr_r50_o365", "rtdetr_r50", (), "v0.1/rtdetr_r50vd_2x_coco_objects365_from_paddle.pth"),
        ("rtdetr_r101_o365", "rtdetr_r50", _R101_WIDE, "v0.1/rtdetr_r101vd_2x_coco_objects365_from_paddle.pth"),
        ("rtdetrv2_r18", "rtdetrv2_r18", (), "v0.2/rtdetrv2_r18vd_120e_coco_rerun_48.1.pth"),
        ("rtdetrv2_r34", "rtdetrv2_r18", _R34VD, "v0.1/rtdetrv2_r34vd_120e_coco_ema.pth"),
        ("rtdetrv2_r50_m", "rtdetrv2_r50", _R50_M, "v0.1/rtdetrv2_r50vd_m_7x_coco_ema.pth"),
        ("rtdetrv2_r50", "rtdetrv2_r50", (), "v0.1/rtdetrv2_r50vd_6x_coco_ema.pth"),
        ("rtdetrv2_r101", "rtdetrv2_r50", _R101_WIDE, "v0.1/rtdetrv2_r101vd_6x_coco_from_paddle.pth"),
        ("rtdetrv2_r18_discrete", "rtdetrv2_r18", _DISCRETE, "v0.1/rtdetrv2_r18vd_dsp_3x_coco.pth"),
        ("rtdetrv2_r34_discrete", "rtdetrv2_r18", (*_R34VD, *_DISCRETE), "v0.1/rrtdetrv2_r34vd_dsp_1x_coco.pth"),
        ("rtdetrv2_r50_m_discrete", "rtdetrv2_r50", (*_R50_M, *_DISCRETE), "v0.1/rtdetrv2_r50vd_m_dsp_3x_coco.pth"),
        ("rtdetrv2_r50_discrete", "rtdetrv2_r50", _DISCRETE, "v0.1/rtdetrv2_r50vd_dsp_1x_coco.pth"),
    ):
        yield PublishedWeights(name, recipe, settings, page, f"{base}/{file}", "apache-2.0")


def _dfine() -> Iterator[PublishedWeights]:
    page, base = (
        "https://github.com/Peterande/D-FINE",
        "https://github.com/Peterande/storage/releases/download/dfinev1.0",
    )
    for name, file in (
        *((f"dfine_{size}", f"dfine_{size}_coco") for size in "nsmlx"),
        *((f"dfine_{size}_o365", f"dfine_{size}_obj2coco") for size in "smx"),
        ("dfine_l_o365", "dfine_l_obj2coco_e25"),
    ):
        yield PublishedWeights(name, name.removesuffix("_o365"), (), page, f"{base}/{file}.pth", "apache-2.0")


def _lwdetr() -> Iterator[PublishedWeights]:
    page, files = "https://github.com/Atten4Vis/LW-DETR", f"{HUB}/xbsu/LW-DETR/resolve/main/pretrain_weights"
    for size in _LWDETR:
        name = f"lwdetr_{size}"
        yield PublishedWeights(name, name, (), page, f"{files}/LWDETR_{size}_60e_coco.pth", "apache-2.0")


def _hugging_face() -> Iterator[PublishedWeights]:
    """Yield files ``model.safetensors`` of transformers, under a name of ours if there is no file of the authors."""
    for name, hub_id, recipe, settings, megabytes, sha256 in (
        ("", "facebook/detr-resnet-50", "detr_r50", (), 167, None),
        ("", "facebook/detr-resnet-101", "detr_r50", _R101, 243, None),
        ("", "microsoft/conditional-detr-resnet-50", "conditional_detr_r50", (), 174, None),
        ("dab_detr_r50", "IDEA-Research/dab-detr-resnet-50", "dab_detr_r50", (), 175, None),
        ("dab_detr_r50_dc5", "IDEA-Research/dab-detr-resnet-50-dc5", "dab_detr_r50", _DC5, 175, None),
        ("deformable_detr_r50", "SenseTime/deformable-detr", "deformable_detr_r50", (), 161, _SENSETIME[0]),
        (
            "deformable_detr_r50_refine",
            "SenseTime/deformable-detr-with-box-refine",
            "deformable_detr_r50_refine",
            (),
            164,
            _SENSETIME[1],
        ),
        (
            "deformable_detr_r50_two_stage",
            "SenseTime/deformable-detr-with-box-refine-two-stage",
            "deformable_detr_r50_two_stage",
            (),
            165,
            None,
        ),
        (
            "deformable_detr_r50_single_scale_dc5",
            "SenseTime/deformable-detr-single-scale-dc5",
            "deformable_detr_r50_single_scale",
            _DC5,
            137,
            None,
        ),
        ("", "PekingU/rtdetr_r18vd", "rtdetr_r18", (), 80.9, None),
        ("", "PekingU/rtdetr_r34vd", "rtdetr_r18", _R34VD, 126, None),
        ("", "PekingU/rtdetr_r50vd", "rtdetr_r50", (), 172, None),
        ("", "PekingU/rtdetr_r101vd", "rtdetr_r50", _R101_WIDE, 307, None),
        ("", "PekingU/rtdetr_r50vd_coco_o365", "rtdetr_r50", (), 172, None),
        ("", "PekingU/rtdetr_r101vd_coco_o365", "rtdetr_r50", _R101_WIDE, 307, None),
        ("", "PekingU/rtdetr_v2_r18vd", "rtdetrv2_r18", (), None, None),
        ("", "PekingU/rtdetr_v2_r34vd", "rtdetrv2_r18", _R34VD, 126, None),
        ("", "PekingU/rtdetr_v2_r50vd", "rtdetrv2_r50", (), 172, None),
        ("", "PekingU/rtdetr_v2_r101vd", "rtdetrv2_r50", _R101_WIDE, None, None),
        *((f"rfdetr_{each}", f"Roboflow/rf-detr-{each}", f"rfdetr_{each}", (), None, None) for each in _RFDETR),
        *(("", f"AnnaZhang/lwdetr_{each}_60e_coco", f"lwdetr_{each}", (), None, None) for each in _LWDETR),
        ("", "ustc-community/dfine-nano-coco", "dfine_n", (), 15.3, None),
        ("", "ustc-community/dfine-small-coco", "dfine_s", (), 41.5, None),
        ("", "ustc-community/dfine-medium-coco", "dfine_m", (), 78.7, None),
        ("", "ustc-community/dfine-large-coco", "dfine_l", (), 126, None),
        ("", "ustc-community/dfine-xlarge-coco", "dfine_x", (), 252, None),
        ("", "ustc-community/dfine-small-obj2coco", "dfine_s", (), 41.5, None),
        ("", "ustc-community/dfine-medium-obj2coco", "dfine_m", (), 78.7, None),
        ("", "ustc-community/dfine-xlarge-obj2coco", "dfine_x", (), 252, None),
    ):
        url = f"{HUB}/{hub_id}/resolve/main/model.safetensors"
        for each in filter(None, (name, hub_id)):
            page = f"{HUB}/{hub_id}"
            yield PublishedWeights(each, recipe, settings, page, url, "apache-2.0", sha256, megabytes)


_SENSETIME = (
    "caf1e3e61283c6ce35cd2d9adaa7033cf40997d4dfe434003bcdb9085cc8cf9b",
    "4113700fe8aade398808424b7c5c1304cfbf886adc6450a6ca5d50a702be3373",
)


def _by_hand() -> Iterator[PublishedWeights]:
    """Yield weights on Google Drive and SharePoint, which a person must get."""
    patterns = ("model.dab.patterns=3",)
    for page, licence, rows in (
        ("https://github.com/IDEA-Research/DINO", "apache-2.0", (("dino_r50_4scale", ()), ("dino_r50_5scale", ()))),
        ("https://github.com/IDEA-Research/DN-DETR", "apache-2.0", (("dn_detr_r50", ()),)),
        (
            "https://github.com/IDEA-Research/DAB-DETR",
            "apache-2.0",
            (("dab_deformable_detr_r50", ()), ("dab_detr_r50_3pat", patterns)),
        ),
        (
            "https://github.com/fundamentalvision/Deformable-DETR",
            "apache-2.0",
            (("deformable_detr_r50_single_scale", ()),),
        ),
        (
            "https://github.com/ShihuaHuang95/DEIM",
            "apache-2.0",
            tuple(
                (f"deim_{name}", ())
                for name in (*(f"dfine_{size}" for size in "nsmlx"), "rtdetrv2_r18", "rtdetrv2_r50")
            ),
        ),
        (
            "https://github.com/zhihou7/BatchFormer",
            "",
            (("detr_r50_bfv2", ()), ("conditional_detr_r50_bfv2", ()), ("deformable_detr_r50_bfv2", ())),
        ),
    ):
        for name, settings in rows:
            yield PublishedWeights(name, name.removesuffix("_3pat"), settings, page, "", licence)


_ROWS = (_detr, _conditional_detr, _h_deformable_detr, _rtdetr, _dfine, _lwdetr, _hugging_face, _by_hand)
_TABLE = {row.name: row for rows in _ROWS for row in rows()}
