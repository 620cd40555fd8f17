"""Figures and report pages of classifiers and masked autoencoders."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.classification import figures as class_figures
from detr_bf.classification.config import (
    BatchFormerPluginConfig,
    BatchFormerV2PluginConfig,
    ClassifierConfig,
    ClassifierDataConfig,
    DiversePatchConfig,
    ImageDataConfig,
    LongTailConfig,
    PluginsConfig,
    RelativeLocalizationConfig,
)
from detr_bf.classification.figures import save_class_accuracies, save_confusion
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.metrics import ClassAccuracy, ClassificationResult, ReconstructionResult
from detr_bf.classification.page import CLASSIFICATION_PAGE, MASKED_PAGE, data_sentence, plugin_names
from detr_bf.classification.sheet import ClassifiedImage, classification_sheet, reconstruction_sheet
from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json, write_text
from detr_bf.config import config_to_yaml
from detr_bf.config.common import ContextBroadcastingConfig
from detr_bf.report import save_picture, write_report
from tests.report.page import Page

NAMES = ["<b>cat</b>", "dog", "a rather long class name that cannot stand anywhere", "unseen"]
RESULT = ClassificationResult(
    top1=0.7,
    top5=None,
    many=0.9,
    medium=0.5,
    few=None,
    balanced=0.6512,
    ece=0.123,
    loss=0.98765,
    per_class={
        NAMES[0]: ClassAccuracy(0.9, 10, 5000, "many"),
        NAMES[1]: ClassAccuracy(0.55, 20, 50, "medium"),
        NAMES[2]: ClassAccuracy(0.2, 10, 40, "medium"),
        NAMES[3]: ClassAccuracy(None, 0, 21, "medium"),
    },
    num_images=40,
    num_not_finite=0,
    confusion=((9, 1, 0, 0), (9, 11, 0, 0), (0, 8, 2, 0), (0, 0, 0, 0)),
)


def of_classes(count: int) -> ClassificationResult:
    per_class = {f"class {c}": ClassAccuracy(0.5, 2, 100 - c, "medium") for c in range(count)}
    confusion = tuple(tuple(int(column in (row, (row + 1) % count)) for column in range(count)) for row in range(count))
    return replace(RESULT, per_class=per_class, confusion=confusion)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of writing them."""
    drawn: list[Figure] = []
    monkeypatch.setattr(class_figures, "save_figure", lambda path, figure: drawn.append(figure))
    return drawn


def test_the_matrix_holds_shares_of_the_true_classes_and_lists_the_worst_mistakes(figures: list[Figure]) -> None:
    save_confusion("confusion.png", RESULT)
    matrix, mistakes = figures[0].axes
    shown = np.asarray(matrix.images[0].get_array())
    np.testing.assert_allclose(shown[:3], [[0.9, 0.1, 0, 0], [0.45, 0.55, 0, 0], [0, 0.8, 0.2, 0]])
    assert (shown[3] == 0).all(), "a class without images"
    cells = {text.get_position()[::-1]: text.get_text() for text in matrix.texts}
    assert cells == {(0, 0): "90", (0, 1): "10", (1, 0): "45", (1, 1): "55", (2, 1): "80", (2, 2): "20"}
    listed = [text.get_text() for text in mistakes.texts]
    assert listed[:3] == ["a rather long class nam… taken for dog", " 80.0", "dog taken for <b>cat</b>"]
    assert listed[3:] == [" 45.0", "<b>cat</b> taken for dog", " 10.0"]


def test_many_classes_have_names_but_no_numbers(figures: list[Figure]) -> None:
    save_confusion("confusion.png", of_classes(100))
    matrix, mistakes = figures[0].axes
    assert not matrix.texts
    assert [label.get_text() for label in matrix.get_yticklabels()][:100] == [f"class {c}" for c in range(100)]
    assert len(mistakes.patches) == 12


def test_figures_are_written_for_any_number_of_classes(tmp_path: Path) -> None:
    save_confusion(tmp_path / "one.png", of_classes(1))
    save_confusion(tmp_path / "many.svg", of_classes(40))
    save_class_accuracies(tmp_path / "many.png", replace(of_classes(120), confusion=None))
    for name in ("one.png", "many.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 1000
    with pytest.raises(InputError, match="no confusion matrix"):
        save_confusion(tmp_path / "none.png", replace(of_classes(120), confusion=None))
    for function in (save_confusion, save_class_accuracies):
        with pytest.raises(InputError, match=r"\.svg, \.png or \.pdf"):
            function(tmp_path / "x.bmp", RESULT)


def test_no_mistakes_and_no_training_images_are_drawn(tmp_path: Path) -> None:
    perfect = {name: ClassAccuracy(1.0, 1, 0, "few") for name in "ab"}
    result = replace(RESULT, per_class=perfect, confusion=((1, 0), (0, 1)), few=1.0, many=None, medium=None)
    save_confusion(tmp_path / "confusion.png", result)
    save_class_accuracies(tmp_path / "classes.svg", result)
    assert (tmp_path / "confusion.png").stat().st_size > 1000


def test_classes_stand_from_many_training_images_to_few(figures: list[Figure]) -> None:
    shuffled = dict(sorted(RESULT.per_class.items(), key=lambda item: item[1].train_images))
    save_class_accuracies("classes.svg", replace(RESULT, per_class=shuffled))
    above, below = figures[0].axes
    assert [bar.get_height() for bar in above.patches] == [5000, 50, 40, 21]
    assert above.get_yscale() == "log"
    assert [bar.get_height() for bar in below.patches] == pytest.approx([90, 55, 20, 0])
    assert [text.get_text() for text in below.texts] == ["90.0", "55.0", "20.0", "no images"]
    names = [label.get_text() for label in below.get_xticklabels()]
    assert names == ["<b>cat</b>", "dog", "a rather long class nam…", "unseen"]
    legend = below.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["many-shot 90.0", "medium-shot 50.0"]


def image(value: int, height: int = 28, width: int = 28) -> Tensor:
    return torch.full((3, height, width), value, dtype=torch.uint8)


def rows_of(picture: Image.Image, value: int) -> tuple[int, int]:
    """Return the first and last row that have a grey level in more than 100 pixels."""
    grey = (transforms.pil_to_tensor(picture) == value).all(0)
    lines = (grey.sum(1) > 100).nonzero().flatten()
    return int(lines[0]), int(lines[-1])


def test_mistakes_stand_above_right_answers() -> None:
    right, wrong = ClassifiedImage(image(60), 1, 1, 0.9), ClassifiedImage(image(200), 0, 1, 0.8)
    sheet = classification_sheet([right, wrong], NAMES)
    assert rows_of(sheet, 200)[1] < rows_of(sheet, 60)[0]


def test_the_words_below_an_image_are_green_or_vermilion_and_say_both_classes() -> None:
    sheets = {
        label: transforms.pil_to_tensor(classification_sheet([ClassifiedImage(image(255), label, 1, 0.9)], NAMES))
        for label in (0, 1, 2)
    }
    for label, colour in ((1, (0, 122, 89)), (0, (190, 62, 0))):
        letters = (sheets[label] == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0)
        assert letters.sum() > 50
    assert sheets[0].shape == sheets[2].shape
    assert (sheets[0] != sheets[2]).any(), "the true class is written"
    assert sheets[1].shape[1] < sheets[0].shape[1], "a right answer needs no second name"


def test_the_sheet_grows_by_lines_and_takes_images_of_any_shape(tmp_path: Path) -> None:
    row = ClassifiedImage(image(60, 28, 56), 2, 2, 0.987)
    one, six, seven = (classification_sheet([row] * count, NAMES).size for count in (1, 6, 7))
    assert six[0] > one[0]
    assert six[1] == one[1]
    assert seven[0] == six[0]
    assert seven[1] > 1.5 * six[1]
    sheet = classification_sheet([row, ClassifiedImage(image(9, 300, 50), 2, 0, 0.5)], NAMES)
    save_picture(tmp_path / "sheet.png", sheet)
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.format == "PNG"
    with pytest.raises(InputError, match="at least one image"):
        classification_sheet([], NAMES)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = (
        {"kind": "train", "step": 1200, "epoch": 3.5, "loss": 2.0},
        {"kind": "val", "step": 1200, "epoch": 3, "top1": 0.7, "loss": 1.0},
    )
    write_text(tmp_path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write_text(tmp_path / "config.yaml", config_to_yaml(ClassifierConfig()))
    write_json(tmp_path / "evaluation.json", RESULT.to_dict())
    write_json(tmp_path / "machine.json", {"CPU": "fast"})
    save_picture(tmp_path / "pictures" / "validation.png", image(0))
    return tmp_path


def test_the_page_holds_everything(run_dir: Path) -> None:
    page = Page(write_report(run_dir, CLASSIFICATION_PAGE).read_text())
    assert page.tags.count("img") == 3
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert {"confusion.png", "classes.svg"} <= {path.name for path in (run_dir / "pictures").iterdir()}
    start = page.texts.index("Top-1")
    assert page.texts[start : start + 6] == [
        *("Top-1", "70.0", "first guess is right"),
        *("Balanced", "65.1", "mean over classes"),
    ]
    for text in ("1 class", "3 classes", "0 classes", "12.3", "0.988", "fast"):
        assert text in page.texts, text
    everything = " ".join(page.texts)
    assert "deit_small_patch16_224 without plug-ins. Loss: cross entropy. Data: image folder." in everything
    assert "Trained for 1,200 steps, 3.5 epochs." in everything
    assert "Accuracy in percent on 40 images" in everything
    start = page.texts.index("Training images") + 1
    assert page.texts[start : start + 10] == [
        *("<b>cat</b>", "many-shot", "90.0", "10", "5,000"),
        *("dog", "medium-shot", "55.0", "20", "50"),
    ]


def test_what_is_missing_or_not_finite_is_said(run_dir: Path) -> None:
    no_numbers = replace(RESULT, num_not_finite=2, loss=None, ece=None, confusion=None, top5=0.25)
    write_json(run_dir / "evaluation.json", no_numbers.to_dict())
    page = Page(write_report(run_dir, CLASSIFICATION_PAGE).read_text())
    assert any("The logits of 2 images are not finite" in text for text in page.texts)
    assert "25.0" in page.texts
    assert "Confusion" not in page.texts
    (run_dir / "evaluation.json").unlink()
    (run_dir / "pictures" / "validation.png").unlink()
    texts = Page(write_report(run_dir, CLASSIFICATION_PAGE).read_text()).texts
    assert sum("evaluation.json is missing" in text for text in texts) == 2
    assert any("pictures/validation.png is missing" in text for text in texts)


def test_a_result_of_another_task_is_refused(run_dir: Path) -> None:
    write_json(run_dir / "evaluation.json", {"loss": 1.0, "num_images": 3, "num_not_finite": 0})
    with pytest.raises(InputError, match=r"evaluation\.json is not an evaluation summary"):
        write_report(run_dir, CLASSIFICATION_PAGE)


def test_the_plug_ins_that_are_on_are_named() -> None:
    config = ClassifierConfig()
    assert plugin_names(config) == []
    config.plugins = PluginsConfig(
        BatchFormerV2PluginConfig(enabled=True, layers=[3, 7], mode="duplicate"),
        BatchFormerPluginConfig(enabled=True, shared_classifier=False),
        ContextBroadcastingConfig(enabled=True, scaled=True),
        DiversePatchConfig(enabled=True),
        RelativeLocalizationConfig(enabled=True, weight=0.5),
    )
    assert plugin_names(config) == [
        "BatchFormerV2 before blocks 3, 7, mode duplicate",
        "BatchFormer after pooling without shared classifier",
        "Context Broadcasting in upper blocks, scaled",
        "DiversePatch (cosine 1, contrastive 1, mixing 1, patch CutMix)",
        "relative localization (abs, weight 0.5)",
    ]


def test_the_controls_of_diverse_patch_are_named() -> None:
    config = PluginsConfig(diverse_patch=DiversePatchConfig(True, 0, 0, 0))
    assert plugin_names(ClassifierConfig(plugins=config)) == ["DiversePatch (no loss, patch CutMix)"]
    config.diverse_patch = DiversePatchConfig(True, 0.5, 0, 0, patch_cutmix=False)
    assert plugin_names(ClassifierConfig(plugins=config)) == ["DiversePatch (cosine 0.5)"]


def test_a_linear_probe_is_called_one(run_dir: Path) -> None:
    config = ClassifierConfig()
    config.model.linear_probe = True
    write_text(run_dir / "config.yaml", config_to_yaml(config))
    texts = Page(write_report(run_dir, CLASSIFICATION_PAGE).read_text()).texts
    assert any(text.startswith("Linear probe of deit_small_patch16_224 without plug-ins.") for text in texts)


def test_the_data_are_named() -> None:
    data = ImageDataConfig(name="fashion_mnist", long_tail=LongTailConfig(imbalance=100), per_class=1500)
    assert data_sentence(data) == "Data: fashion mnist, imbalance 100, at most 1,500 images a class, subset seed 0."
    data = ImageDataConfig(name="digits", per_class=5, subset_seed=None)
    assert data_sentence(data) == "Data: digits, at most 5 images a class, drawn by the seed of the run."
    assert data_sentence(ImageDataConfig(name="digits", subset_seed=None)) == "Data: digits."


def test_what_was_evaluated_is_named(run_dir: Path) -> None:
    data = ClassifierDataConfig(name="image_folder", root="r", val="imagenet-a", val_subset=True)
    told = "Validation images are those of imagenet-a, scored among their classes alone"
    assert data_sentence(data) == f"Data: image folder. {told}."
    data.val_labels = "labels/<b>real.json"
    assert data_sentence(data) == f"Data: image folder. {told} with the labels of <b>real.json."
    data = replace(data, val="val", val_subset=False)
    assert data_sentence(data).endswith("Validation images are those of val, scored with the labels of <b>real.json.")
    write_text(run_dir / "config.yaml", config_to_yaml(ClassifierConfig(data=data)))
    texts = Page(write_report(run_dir, CLASSIFICATION_PAGE).read_text()).texts
    assert any("scored with the labels of <b>real.json." in text for text in texts), "as text, not as a tag"


# ---- masked autoencoders ----


def pictures(count: int, value: int) -> Tensor:
    return torch.full((count, 3, 16, 16), value, dtype=torch.uint8)


def test_original_masked_and_reconstruction_stand_side_by_side() -> None:
    sheet = transforms.pil_to_tensor(reconstruction_sheet(pictures(1, 30), pictures(1, 90), pictures(1, 150)))
    ends = []
    for value in (30, 90, 150):
        columns = ((sheet == value).all(0).sum(0) > 100).nonzero().flatten()
        ends.append((int(columns[0]), int(columns[-1])))
    assert ends == sorted(ends)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(ends))
    assert len({last - first for first, last in ends}) == 1


def test_the_reconstruction_sheet_grows_by_lines(tmp_path: Path) -> None:
    two, three = (reconstruction_sheet(*[pictures(count, 9)] * 3).size for count in (2, 3))
    assert three[0] == two[0]
    assert three[1] > 1.5 * two[1]
    save_picture(tmp_path / "sheet.png", reconstruction_sheet(*[pictures(2, 9)] * 3))
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == two
    with pytest.raises(InputError, match="at least one image"):
        reconstruction_sheet(*[pictures(0, 9)] * 3)
    with pytest.raises(InputError, match="must be of one shape"):
        reconstruction_sheet(pictures(2, 1), pictures(2, 1), pictures(1, 1))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_page_of_a_masked_autoencoder(tmp_path: Path, enabled: bool) -> None:
    config = MaskedConfig()
    config.batch_former.enabled = enabled
    write_text(tmp_path / "config.yaml", config_to_yaml(config))
    write_text(tmp_path / "metrics.jsonl", json.dumps({"kind": "train", "step": 7, "epoch": 1, "loss": 2.0}) + "\n")
    write_json(tmp_path / "evaluation.json", ReconstructionResult(0.12345, 1000).to_dict())
    save_picture(tmp_path / "pictures" / "validation.png", reconstruction_sheet(*[pictures(1, 9)] * 3))
    page = Page(write_report(tmp_path, MASKED_PAGE).read_text())
    assert page.tags.count("img") == 1
    assert "0.1235" in page.texts
    everything = " ".join(page.texts)
    assert "Masked autoencoder of vit_base_patch16_224, 75 % of the patches masked." in everything
    plugin = "with BatchFormerV2 before all blocks of its decoder" if enabled else "without plug-ins"
    assert f"Decoder of 8 blocks, {plugin}." in everything
    assert "Mean squared error over the masked patches of 1,000 images." in everything
    assert "Classes" not in page.texts


def test_what_is_missing_or_not_finite_is_said_of_a_masked_autoencoder(tmp_path: Path) -> None:
    write_text(tmp_path / "config.yaml", config_to_yaml(MaskedConfig()))
    write_json(tmp_path / "evaluation.json", ReconstructionResult(None, 5, 1).to_dict())
    texts = Page(write_report(tmp_path, MASKED_PAGE).read_text()).texts
    assert any("That of 1 image is not finite." in text for text in texts)
    for name in ("metrics.jsonl", "pictures/validation.png", "machine.json"):
        assert any(name in text and "missing" in text for text in texts), name
