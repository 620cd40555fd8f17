"""Detectors by name; the file of each has its options, its needs and the function that chooses its parts."""

from __future__ import annotations

from detr_bf.common.errors import InputError
from detr_bf.detectors.conditional_detr import conditional_detr
from detr_bf.detectors.dab_deformable_detr import dab_deformable_detr
from detr_bf.detectors.dab_detr import dab_detr
from detr_bf.detectors.declaration import DetectorKind
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.detr import detr
from detr_bf.detectors.dfine import dfine
from detr_bf.detectors.dino import dino
from detr_bf.detectors.dn_detr import dn_detr
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.detectors.rfdetr import rfdetr
from detr_bf.detectors.rtdetr import rtdetr, rtdetrv2
from detr_bf.detectors.smca import smca
from detr_bf.detectors.smca_multi_scale import smca_multi_scale

__all__ = ["DETECTORS", "Detector", "MaskHead", "Options", "detector_named"]

DETECTORS: dict[str, DetectorKind] = {
    "conditional_detr": conditional_detr,
    "dab_deformable_detr": dab_deformable_detr,
    "dab_detr": dab_detr,
    "deformable_detr": deformable_detr,
    "detr": detr,
    "dfine": dfine,
    "dino": dino,
    "dn_detr": dn_detr,
    "rfdetr": rfdetr,
    "rtdetr": rtdetr,
    "rtdetrv2": rtdetrv2,
    "smca": smca,
    "smca_multi_scale": smca_multi_scale,
}


def detector_named(name: str) -> DetectorKind:
    """Return a detector by its name.

    Raises:
        InputError: there is no such detector.
    """
    if name not in DETECTORS:
        raise InputError(f"model.name must be one of {', '.join(DETECTORS)}; got '{name}'")
    return DETECTORS[name]
