"""Parts of ``report.html`` for classifiers, masked autoencoders and contrastive pre-training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from detr_bf.classification.config import ClassifierConfig, ClassifierDataConfig, ImageSetConfig
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.figures import save_class_accuracies, save_confusion
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.metrics import GROUPS, ClassificationResult, ContrastiveResult, ReconstructionResult
from detr_bf.common.files import EVALUATION_FILE, SHEET_FILE, SUSPECTS_FILE
from detr_bf.common.text import counted
from detr_bf.report.charts import Chart, Line, chart_group
from detr_bf.report.curves import CurvePlan
from detr_bf.report.detection import blocks, context_broadcasting, relative_localization
from detr_bf.report.error_sections import error_sections, reliability_chart
from detr_bf.report.page import headline, missing, number, percent, picture, row, section, table, validation_sheet
from detr_bf.report.task_page import TaskPage

CONFUSION_FILE = "pictures/confusion.png"
CLASSES_FILE = "pictures/classes.svg"


def _sentences(config: ClassifierConfig) -> list[str]:
    plugins = plugin_names(config)
    loss = config.loss.name.replace("_", " ")
    added = f"with {'; '.join(plugins)}" if plugins else "without plug-ins"
    probe = "Linear probe of " if config.model.linear_probe else ""
    experts = f" of {config.model.experts} experts" if config.model.experts > 1 else ""
    variant = "" if config.model.variant == "plain" else f", variant {config.model.variant.replace('_', ' ')},"
    return [f"{probe}{config.model.name}{experts}{variant} {added}.", f"Loss: {loss}.", data_sentence(config.data)]


def plugin_names(config: ClassifierConfig) -> list[str]:
    """Return the enabled plug-ins, each with its position and settings."""
    plugins, names = config.plugins, []
    if plugins.batchformer_v2.enabled:
        v2 = plugins.batchformer_v2
        names.append(f"BatchFormerV2 {v2.position} {blocks(v2.layers)}, mode {v2.mode.replace('_', ' ')}")
    if plugins.batchformer.enabled:
        shared = "" if plugins.batchformer.shared_classifier else " without shared classifier"
        names.append(f"BatchFormer after pooling{shared}")
    names += context_broadcasting(plugins.context_broadcasting)
    if (diverse := plugins.diverse_patch).enabled:
        weights = {name: getattr(diverse, name) for name in ("cosine", "contrastive", "mixing")}
        losses = [f"{name} {weight:g}" for name, weight in weights.items() if weight] or ["no loss"]
        names.append(f"DiversePatch ({', '.join(losses)}{', patch CutMix' if diverse.patch_cutmix else ''})")
    names += relative_localization(plugins.relative_localization)
    return names


def data_sentence(data: ImageSetConfig) -> str:
    """Return one sentence about the training data, and one about an evaluation that is not the usual one."""
    details = [f"imbalance {data.long_tail.imbalance:g}"] if data.long_tail.imbalance > 1 else []
    details += [f"at most {data.per_class:,} images a class"] if data.per_class else []
    if details:
        details.append(
            "drawn by the seed of the run" if data.subset_seed is None else f"subset seed {data.subset_seed}"
        )
    sentence = f"Data: {', '.join([data.name.replace('_', ' '), *details])}."
    if not isinstance(data, ClassifierDataConfig) or not (data.val_subset or data.val_labels):
        return sentence
    among = " among their classes alone" if data.val_subset else ""
    labels = f" with the labels of {Path(data.val_labels).name}" if data.val_labels else ""
    return f"{sentence} Validation images are those of {data.val}, scored{among}{labels}."


def _results(result: ClassificationResult | None) -> Iterator[str]:
    yield section("Validation", _headline(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _details(run_dir: Path, result: ClassificationResult | None) -> Iterator[str]:
    if result:
        description = "Accuracy of every class, from those with the most training images to those with the fewest"
        accuracies = picture(run_dir / CLASSES_FILE, description, lambda path: save_class_accuracies(path, result))
        yield section("Accuracy by number of training images", accuracies)
    if result and result.confusion:
        description = "Confusion matrix: share of the images of each true class by predicted class"
        confusion = picture(run_dir / CONFUSION_FILE, description, lambda path: save_confusion(path, result))
        yield section("Confusion", confusion)
    description = "Validation images with the most confident mistakes and right answers"
    yield section("Validation images", validation_sheet(run_dir / SHEET_FILE, description))
    yield from error_sections(run_dir, _error_sections)
    yield section("Classes", _class_table(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _error_sections(run_dir: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections made from ``errors.json``."""
    names = content["classes"]
    if content["mistakes"]:
        yield section("Most confident mistakes", _mistakes_table(content["mistakes"], names))
    if content["pairs"]:
        rows = (
            row(
                f"{names[pair['label']]} taken for {names[pair['predicted']]}",
                pair["share"],
                (f"{pair['images']:,}", percent(pair["share"]), f"{pair['reverse']:,}"),
            )
            for pair in content["pairs"]
        )
        titles = ("True and predicted class", "Images", "% of the true class", "The other way round")
        yield section("Most frequently confused classes", table(titles, rows))
    if suspects := content["suspects"]:
        note = (
            f"{counted(content['likely_label_errors'], 'image')} of {content['images']:,}: the predicted class is at "
            "least as probable as on average over the images labelled with it (confident learning, Northcutt et al. "
            "2021). Shown are those with the largest difference from the probability of the label."
        )
        shown = picture(run_dir / SUSPECTS_FILE, "Labels to check") if (run_dir / SUSPECTS_FILE).is_file() else ""
        yield section("Labels to check", f'{shown}<p class="faint">{note}</p>' + _mistakes_table(suspects, names))
    shares = [at / len(content["coverage"]) for at in range(1, len(content["coverage"]) + 1)]
    lowest = max(0.0, math.floor(10 * min(content["coverage"]) - 0.5) / 10)
    most_confident = Line("accuracy", shares, content["coverage"], "blue")
    drawn = chart_group(
        [
            reliability_chart(
                "Accuracy by probability, with the number of images", content["reliability"], "probability"
            ),
            Chart("Accuracy of the most confident images", [most_confident], "share of the images", low=lowest),
        ]
    )
    note = (
        "Left: probabilities of a well calibrated classifier equal the accuracy. Right: accuracy if only the most "
        "confident share of the images is classified."
    )
    yield section("Reliability", f'{drawn}<p class="faint">{note}</p>')


def _mistakes_table(mistakes: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows = (
        row(
            each["file"] or f"image {each['index']}",
            each["score"],
            (names[each["label"]], names[each["predicted"]], percent(each["score"]), percent(each["true_score"])),
        )
        for each in mistakes
    )
    return table(("Image", "Label", "Predicted", "Probability (%)", "of the label (%)"), rows)


def _headline(result: ClassificationResult) -> str:
    large = [("Top-1", percent(result.top1), "first guess is right")]
    if result.top5 is not None:
        large.append(("Top-5", percent(result.top5), "one of five is right"))
    large.append(("Balanced", percent(result.balanced), "mean over classes"))
    sizes = Counter(of_class.group for of_class in result.per_class.values())
    small = [
        (f"{group.capitalize()}-shot", percent(result.metrics[group]), counted(sizes[group], "class", "classes"))
        for group in GROUPS
    ]
    small.append(("Calibration error", percent(result.ece), "15 bins"))
    small.append(("Cross-entropy", number(result.loss), "mean over images"))
    note = (
        f"Accuracy in percent on {counted(result.num_images, 'image')}; many-, medium-, few-shot: means over classes."
    )
    if result.num_not_finite:
        note += f" The logits of {counted(result.num_not_finite, 'image')} are not finite; they count as wrong."
    return headline(large, small, note)


def _class_table(result: ClassificationResult) -> str:
    """Return the table of classes, best first; classes without validation images last."""
    ordered = sorted(result.per_class.items(), key=lambda item: -1.0 if item[1].accuracy is None else item[1].accuracy)
    titles = ("Class", "Accuracy", "Images", "Training images")
    rows = (
        row(
            name,
            of_class.accuracy,
            (percent(of_class.accuracy), f"{of_class.images:,}", f"{of_class.train_images:,}"),
            f"{of_class.group}-shot",
        )
        for name, of_class in reversed(ordered)
    )
    return table(titles, rows)


def _masked_sentences(config: MaskedConfig) -> list[str]:
    former = config.batch_former
    plugins = f"with BatchFormerV2 {former.position} {blocks(former.layers)} of its decoder"
    plugins = plugins if former.enabled else "without plug-ins"
    return [
        f"Masked autoencoder of {config.model.name}, {100 * config.model.mask_ratio:g} % of the patches masked.",
        f"Decoder of {counted(config.model.decoder_depth, 'block')}, {plugins}.",
        data_sentence(config.data),
    ]


def _masked_results(result: ReconstructionResult | None) -> Iterator[str]:
    content = missing(EVALUATION_FILE, "evaluation")
    if result is not None:
        note = f"Mean squared error over the masked patches of {counted(result.num_images, 'image')}."
        if result.num_not_finite:
            note += f" That of {counted(result.num_not_finite, 'image')} is not finite."
        content = headline([("Loss", number(result.loss, 4), "masked patches")], [], note)
    yield section("Validation", content)


def _masked_details(run_dir: Path, result: ReconstructionResult | None) -> Iterator[str]:
    description = "Validation images: original, masked, and reconstruction"
    yield section("Validation images", validation_sheet(run_dir / SHEET_FILE, description))


def _contrastive_sentences(config: ContrastiveConfig) -> list[str]:
    former = config.batch_former
    state = f"a {'frozen' if former.frozen else 'trained'} BatchFormer before both projectors"
    plugins = f"with {state}" if former.enabled else "without plug-ins"
    return [
        f"Contrastive pre-training (MoCo v3) of {config.model.name}, {plugins}.",
        f"Momentum {config.model.momentum:g}, temperature {config.loss.temperature:g}.",
        data_sentence(config.data),
    ]


def _contrastive_results(result: ContrastiveResult | None) -> Iterator[str]:
    content = missing(EVALUATION_FILE, "evaluation")
    if result is not None:
        note = f"Two augmented views of {counted(result.num_images, 'image')}."
        large = [
            ("Instance accuracy", percent(result.instance_accuracy), "nearest key is the image's own"),
            ("Loss", number(result.loss, 4), "both directions"),
        ]
        content = headline(large, [], note)
    yield section("Validation", content)


CLASSIFICATION_PAGE = TaskPage(
    task="classification",
    curves=CurvePlan(
        scores=(("top5", "top-5", "sky"), ("top1", "top-1", "black")),
        groups=(("many", "many-shot", "blue"), ("medium", "medium-shot", "orange"), ("few", "few-shot", "red")),
    ),
    read_result=ClassificationResult.from_dict,
    sentences=_sentences,
    results=_results,
    details=_details,
    costs=lambda runs: "",
    classes=lambda result: {name: own.accuracy for name, own in result.per_class.items()},
)
MASKED_PAGE = TaskPage(
    task="masked_autoencoding",
    curves=CurvePlan(),
    read_result=ReconstructionResult.from_dict,
    sentences=_masked_sentences,
    results=_masked_results,
    details=_masked_details,
    costs=lambda runs: "",
    classes=lambda result: {},
)
CONTRASTIVE_PAGE = TaskPage(
    task="contrastive_learning",
    curves=CurvePlan(scores=(("instance_accuracy", "instance accuracy", "black"),)),
    read_result=ContrastiveResult.from_dict,
    sentences=_contrastive_sentences,
    results=_contrastive_results,
    details=lambda run_dir, result: iter(()),
    costs=lambda runs: "",
    classes=lambda result: {},
)
