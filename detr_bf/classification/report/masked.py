"""What ``report.html`` says of a masked autoencoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detr_bf.classification.metrics import ReconstructionResult
from detr_bf.classification.report.page import data_sentence
from detr_bf.config import MaskedConfig
from detr_bf.report.curves import RECONSTRUCTION_CURVES
from detr_bf.report.elements import EVALUATION_FILE, SHEET_FILE, count, headline, missing, number, section, sheet
from detr_bf.report.shared_plugins import blocks
from detr_bf.report.task_page import TaskPage


def _sentences(config: MaskedConfig) -> list[str]:
    """What was trained."""
    former = config.batch_former
    place = f"with BatchFormerV2 {former.position} {blocks(former.layers)} of its decoder"
    return [
        f"Masked autoencoder of {config.model.name}, {100 * config.model.mask_ratio:g} % of the patches masked.",
        f"Decoder of {count(config.model.decoder_depth, 'block')}, {place if former.enabled else 'without plug-ins'}.",
        data_sentence(config.data),
    ]


def _results(result: ReconstructionResult | None) -> Iterator[str]:
    """The numbers of the last evaluation."""
    yield section("Validation", _headline(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _details(run_dir: Path, result: ReconstructionResult | None) -> Iterator[str]:
    """The pictures."""
    description = "Validation images, what the model saw of them, and what it made of that"
    yield section("Validation images", sheet(run_dir / SHEET_FILE, description))


def _headline(result: ReconstructionResult) -> str:
    note = f"Mean squared error over the masked patches of {count(result.num_images, 'image')}."
    if result.num_not_finite:
        note += f" That of {count(result.num_not_finite, 'image')} is not finite."
    return headline([("Loss", number(result.loss, 4), "masked patches")], [], note)


PAGE = TaskPage(
    curves=RECONSTRUCTION_CURVES,
    curves_description="Training and validation loss over epochs",
    read_result=ReconstructionResult.from_dict,
    sentences=_sentences,
    results=_results,
    details=_details,
)
