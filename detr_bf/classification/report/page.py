"""What ``report.html`` says of a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from detr_bf.classification.metrics import GROUPS, ClassAccuracy, ClassificationResult
from detr_bf.classification.report.figures import save_class_accuracies, save_confusion
from detr_bf.config import ClassifierConfig
from detr_bf.config.classification import ImageDataConfig
from detr_bf.report.curves import CLASSIFICATION_CURVES
from detr_bf.report.elements import (
    EVALUATION_FILE,
    SHEET_FILE,
    count,
    drawn,
    headline,
    missing,
    number,
    percent,
    row,
    section,
    sheet,
    table,
)
from detr_bf.report.shared_plugins import blocks, context_broadcasting, relative_localization
from detr_bf.report.task_page import TaskPage

CONFUSION_FILE = "pictures/confusion.png"
CLASSES_FILE = "pictures/classes.svg"


def _sentences(config: ClassifierConfig) -> list[str]:
    """What was trained."""
    plugins = plugin_names(config)
    loss = config.loss.name.replace("_", " ")
    added = f"with {'; '.join(plugins)}" if plugins else "without plug-ins"
    probe = "Linear probe of " if config.model.linear_probe else ""
    return [f"{probe}{config.model.name} {added}.", f"Loss: {loss}.", data_sentence(config.data)]


def plugin_names(config: ClassifierConfig) -> list[str]:
    """Those that are on, each with where it is and what it does."""
    plugins, names = config.plugins, []
    if plugins.batchformer_v2.enabled:
        v2 = plugins.batchformer_v2
        names.append(f"BatchFormerV2 {v2.position} {blocks(v2.layers)}, mode {v2.mode.replace('_', ' ')}")
    if plugins.batchformer.enabled:
        shared = "" if plugins.batchformer.shared_classifier else " without shared classifier"
        names.append(f"BatchFormer after pooling{shared}")
    names += context_broadcasting(plugins.context_broadcasting)
    if plugins.diverse_patch.enabled:
        names.append("DiversePatch")
    names += relative_localization(plugins.relative_localization)
    return names


def data_sentence(data: ImageDataConfig) -> str:
    """What it was trained on."""
    details = [f"imbalance {data.long_tail.imbalance:g}"] if data.long_tail.imbalance > 1 else []
    details += [f"at most {data.per_class:,} images a class"] if data.per_class else []
    return f"Data: {', '.join([data.name.replace('_', ' '), *details])}."


def _results(result: ClassificationResult | None) -> Iterator[str]:
    """The numbers of the last evaluation."""
    yield section("Validation", _headline(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _details(run_dir: Path, result: ClassificationResult | None) -> Iterator[str]:
    """Pictures, drawn here from the result, and the classes."""
    if result:
        description = "Accuracy of every class, from those with the most training images to those with the fewest"
        accuracies = drawn(run_dir / CLASSES_FILE, description, lambda path: save_class_accuracies(path, result))
        yield section("From many images to few", accuracies)
    if result and result.confusion:
        description = "Confusion matrix: share of the images of each class that was taken for each class"
        confusion = drawn(run_dir / CONFUSION_FILE, description, lambda path: save_confusion(path, result))
        yield section("Confusion", confusion)
    description = "Validation images of which the model is most sure, wrongly and rightly"
    yield section("Validation images", sheet(run_dir / SHEET_FILE, description))
    yield section("Classes", _class_table(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _headline(result: ClassificationResult) -> str:
    large = [("Top-1", percent(result.top1), "right at once")]
    if result.top5 is not None:
        large.append(("Top-5", percent(result.top5), "right within five"))
    large.append(("Balanced", percent(result.balanced), "mean over classes"))
    small = [
        (f"{group.capitalize()}-shot", percent(result.metrics[group]), count(_size(result, group), "class", "classes"))
        for group in GROUPS
    ]
    small.append(("Calibration error", percent(result.ece), "15 bins"))
    small.append(("Cross-entropy", number(result.loss), "of the logits"))
    note = (
        f"Accuracy in percent on {count(result.num_images, 'image')}; many, medium and few shot are means over classes."
    )
    if result.num_not_finite:
        note += f" The logits of {count(result.num_not_finite, 'image')} are not finite, which counts as wrong."
    return headline(large, small, note)


def _size(result: ClassificationResult, group: str) -> int:
    return sum(known.group == group for known in result.per_class.values())


def _class_table(result: ClassificationResult) -> str:
    """Best first; classes that the split does not hold last."""
    ordered = sorted(result.per_class.items(), key=lambda item: -1.0 if item[1].accuracy is None else item[1].accuracy)
    titles: Sequence[str] = ("Class", "Accuracy", "Images", "Training images")
    return table(titles, (_class_row(name, known) for name, known in reversed(ordered)))


def _class_row(name: str, known: ClassAccuracy) -> str:
    values = (percent(known.accuracy), f"{known.images:,}", f"{known.train_images:,}")
    return row(name, known.accuracy, values, f"{known.group}-shot")


PAGE = TaskPage(
    curves=CLASSIFICATION_CURVES,
    curves_description="Training loss, its terms, and validation accuracy over epochs",
    read_result=ClassificationResult.from_dict,
    sentences=_sentences,
    results=_results,
    details=_details,
)
