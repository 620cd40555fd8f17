"""Report page: complete, self-contained, escaped, and explicit about missing parts."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.metrics import ClassificationEvaluator
from detr_bf.classification.page import CLASSIFICATION_PAGE
from detr_bf.commands import main
from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json, write_text
from detr_bf.common.structures import ClassMap
from detr_bf.config import DetectionConfig, config_to_yaml
from detr_bf.config.detection import BatchFormerConfig
from detr_bf.evaluation import ClassResult, CocoSummary, PanopticClassResult, PanopticSummary, Result
from detr_bf.evaluation.results import OperatingPoint
from detr_bf.report import DETECTION_PAGE, save_picture, write_report, write_side_by_side
from detr_bf.report.detection import batch_former_line, encoder_plugins_line
from detr_bf.report.page import picture
from tests.report.page import Page

SUMMARY = CocoSummary(
    AP=0.2754,
    AP50=0.459,
    AP75=0.229,
    APs=0.1,
    APm=0.31,
    APl=None,
    AR1=0.2,
    AR10=0.4,
    AR=0.45,
    ARs=0.2,
    ARm=0.5,
    ARl=None,
    per_class={
        "<script>alert(1)</script>": ClassResult(0.1, 0.2, 12),
        "cat & dog": ClassResult(0.5, 0.8, 1044, OperatingPoint.of(0.34, 0.75, 0.6)),
        "absent": ClassResult(None, None, 0),
    },
    num_objects_by_size={"small": 200, "medium": 1, "large": 0},
    num_images=300,
    num_detections=30_000,
    max_detections=100,
    engine="pycocotools",
    best=OperatingPoint.of(0.41, 0.7, 0.7),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    record = {"kind": "train", "step": 1200, "epoch": 3.5, "loss": 2.0}
    write_text(folder / "metrics.jsonl", json.dumps(record) + "\n")
    config = DetectionConfig(output_dir="<i>here</i>", batch_former=BatchFormerConfig(enabled=True))
    write_text(folder / "config.yaml", config_to_yaml(config))
    write_json(folder / "evaluation.json", SUMMARY.to_dict())
    write_json(folder / "machine.json", {"CPU": "<fast> & cool", "torch": "2.15.0"})
    save_picture(folder / "pictures" / "validation.png", torch.zeros(3, 4, 4, dtype=torch.uint8))
    return folder


def test_the_page_holds_everything_and_loads_nothing(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = path.read_text()
    page = Page(html)
    assert page.tags.count("img") == 1
    assert page.tags.count("svg") >= 2  # curves, bars
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert page.tags.count("script") == 1
    assert "link" not in page.tags
    assert "url(" not in html
    assert "@import" not in html
    for text in ("my run", "27.5", "45.9", "22.9", "10.0", "200 objects", "1 object", "CPU", "2.15.0"):
        assert text in page.texts, text
    everything = " ".join(page.texts)
    assert "Trained for 1,200 steps, 3.5 epochs." in everything
    assert "BatchFormerV2 before encoder layer 0, mode two stream" in everything
    assert "30,000 detections, computed with pycocotools" in everything
    assert "num_queries: 100" in everything


def test_a_page_of_an_evaluation_asks_for_no_curves(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    assert "This run has no metrics" in write_report(run_dir).read_text()
    write_json(run_dir / "detr_bf-run.json", {"kind": "training"})
    assert "This run has no metrics" in write_report(run_dir).read_text()
    write_json(run_dir / "detr_bf-run.json", {"kind": "evaluation"})
    page = write_report(run_dir).read_text()
    assert "metrics.jsonl" not in page
    assert "Curves" not in page


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ((0.2, 0.6, 0.6, 0.5), "Best epoch 3 (best.pt, score 0.6000), last epoch 4 (last.pt, score 0.5000)"),
        ((0.2, 0.6), "The last epoch, 2, is the best (score 0.6000)."),
        ((None, 0.1, None), "Best epoch 2 (best.pt, score 0.1000), last epoch 3 (last.pt, no score)"),
        ((None,), "epochs. "),
    ],
)
def test_the_best_and_the_last_epoch_are_named(run_dir: Path, scores: tuple[float | None, ...], sentence: str) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for epoch, score in enumerate(scores, start=1):
            file.write(json.dumps({"kind": "val", "step": 10 * epoch, "epoch": epoch, "score": score}) + "\n")
    everything = " ".join(Page(write_report(run_dir).read_text()).texts)
    assert sentence in everything
    assert ("score" in everything.split("COCO")[0]) == any(scores)


def test_the_scores_of_raw_and_averaged_weights_are_named(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for epoch, (raw, averaged) in enumerate(((0.2, 0.6), (0.5, 0.4)), start=1):
            record = {"kind": "val", "step": 10 * epoch, "epoch": epoch, "score": max(raw, averaged)}
            file.write(json.dumps(record | {"score/raw": raw, "score/averaged": averaged}) + "\n")
    everything = " ".join(Page(write_report(run_dir).read_text()).texts)
    assert "(best.pt, score 0.6000 with averaged weights, 0.2000 with raw ones)" in everything
    assert "(last.pt, score 0.5000 with raw weights, 0.4000 with averaged ones)" in everything
    assert "Score of the weights (%)" in everything


def test_user_text_is_escaped(run_dir: Path) -> None:
    page = Page(write_report(run_dir, title="a <b>title</b>").read_text())
    assert page.texts.count("a <b>title</b>") == 2  # the heading, and the title of the window
    for text in ("<script>alert(1)</script>", "cat & dog", "<fast> & cool"):
        assert text in page.texts
    assert any("<i>here</i>" in text for text in page.texts)


def test_classes_are_listed_best_first_and_absent_ones_without_numbers(run_dir: Path) -> None:
    texts = Page(write_report(run_dir).read_text()).texts
    start = texts.index("Objects") + 1
    assert texts[start : start + 12] == [
        *("cat & dog", "50.0", "80.0", "1,044"),
        *("<script>alert(1)</script>", "10.0", "20.0", "12"),
        *("absent", "—", "—", "0"),
    ]
    start = texts.index("F1", start) + 1
    assert texts[start : start + 15] == [
        *("cat & dog", "0.34", "75.0", "60.0", "66.7"),
        *("<script>alert(1)</script>", "—", "—", "—", "—"),
        *("absent", "—", "—", "—", "—"),
    ]
    assert "threshold 0.41" in texts


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    texts = Page(write_report(tmp_path).read_text()).texts
    for name in ("evaluation.json", "metrics.jsonl", "pictures/validation.png", "config.yaml", "machine.json"):
        assert any(name in text and "missing" in text for text in texts), name


def test_broken_inputs_are_named_and_the_old_report_stays(run_dir: Path) -> None:
    path = write_report(run_dir)
    before = path.read_bytes()
    for name, content in (
        ("evaluation.json", "{"),
        ("evaluation.json", "[]"),
        ("evaluation.json", '{"AP": 1}'),
        ("machine.json", "[]"),
        ("config.yaml", "model: [1]"),
    ):
        original = (run_dir / name).read_text()
        (run_dir / name).write_text(content)
        with pytest.raises(InputError, match=name):
            write_report(run_dir)
        (run_dir / name).write_text(original)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="run folder not found"):
        write_report(run_dir / "nowhere")


def test_the_page_of_another_task_is_refused(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(config_to_yaml(ClassifierConfig()))
    with pytest.raises(InputError, match=r"config\.yaml is of the task classification, the page of detection"):
        write_report(run_dir)


def test_batch_former_line() -> None:
    config = DetectionConfig()
    on = replace(config.batch_former, enabled=True, layers=[0, 2], position="after", mode="mini_batch_inference")
    line = batch_former_line(replace(config, batch_former=on))
    assert "after encoder layers 0, 2 with shared weights, mode mini batch inference, 4 heads" in line
    assert "batches of 2" in line
    for off in (replace(on, enabled=False), replace(on, layers=[])):
        assert batch_former_line(replace(config, batch_former=off)) == "BatchFormerV2 is off."
    queries = replace(config.batch_former, enabled=True, at="queries", layers=[1, 2])
    line = batch_former_line(replace(config, batch_former=queries))
    assert line.startswith("Batch attention of queries before decoder layers 1, 2")
    blocks = replace(queries, at="backbone", layers=[6])
    assert batch_former_line(replace(config, batch_former=blocks)).startswith("BatchFormerV2 before backbone block 6, ")
    line = batch_former_line(replace(config, batch_former=replace(on, references=True)))
    assert "with shared weights, between each image and its reference, mode" in line


@pytest.mark.parametrize(("reference", "ending"), [("none", ""), ("stack", "the image and"), ("difference", "minus")])
def test_the_reference_of_the_backbone_is_named(reference: str, ending: str) -> None:
    config = DetectionConfig()
    config.model.backbone.reference = reference
    body, *_ = DETECTION_PAGE.sentences(config)
    assert body.startswith(f"{config.model.name.upper()} with {config.model.backbone.name}")
    assert ("reference" in body) == (reference != "none")
    assert ending in body


def test_plugins_of_the_encoder_are_named() -> None:
    plugins = DetectionConfig().plugins
    assert list(encoder_plugins_line(plugins)) == []
    plugins.context_broadcasting.enabled = plugins.relative_localization.enabled = True
    plugins.context_broadcasting.layers, plugins.relative_localization.weight = [5], 0.5
    (line,) = encoder_plugins_line(plugins)
    assert line == "In the encoder: Context Broadcasting in block 5; relative localization (abs, weight 0.5)."
    plugins.context_broadcasting.position = "mid"
    assert next(iter(encoder_plugins_line(plugins))).startswith(
        "In the encoder: Context Broadcasting in block 5, position mid;"
    )


def test_masks_and_panoptic_quality(run_dir: Path) -> None:
    numbers = dict.fromkeys(("PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st"), 0.125)
    per_class = {
        "<thing>": PanopticClassResult(0.4, 0.8, 0.5, 3, 2, 4, True),
        "sky": PanopticClassResult(0.6, 0.9, 2 / 3, 5, 1, 4, False),
        "absent": PanopticClassResult(None, None, None, 0, 0, 0, False),
    }
    panoptic = PanopticSummary(**{**numbers, "PQ": 0.5, "RQ_st": None}, per_class=per_class, num_images=17)
    result = Result(SUMMARY, replace(SUMMARY, AP=0.2222), panoptic)
    write_json(run_dir / "evaluation.json", result.to_dict())
    shutil.copy(run_dir / "pictures" / "validation.png", run_dir / "pictures" / "panoptic.png")
    page = Page(write_report(run_dir).read_text())
    assert page.tags.count("img") == 2
    headings = [text for text in page.texts if text in ("Panoptic segmentation", "Masks", "Boxes", "Panoptic maps")]
    assert headings == 2 * ["Panoptic segmentation", "Masks", "Boxes", "Panoptic maps"]  # links, titles
    for text in ("50.0", "12.5", "22.2", "27.5", "PQ things", "RQ stuff", "—"):
        assert text in page.texts, text
    start = page.texts.index("Missed") + 1
    assert page.texts[start : start + 9] == ["sky", "stuff", "60.0", "90.0", "66.7", "5", "1", "4", "<thing>"]
    assert Result.from_dict(json.loads((run_dir / "evaluation.json").read_text())) == result
    assert str(result) == "PQ 0.500  SQ 0.125  RQ 0.125  AP 0.275  mask AP 0.222"


HOSTILE = ("<script>alert(1)</script>", "caf\udce9\ud800", "\x1b[2J\x00", 'a" onload="x', "a\nb")


def test_names_from_outside_have_no_effect_on_the_page(run_dir: Path) -> None:
    """Put hostile names into class names, the machine record, the config, metrics and the folder's name."""
    folder = run_dir.rename(run_dir.with_name('caf\udce9 "<script>\x1b\n'))
    per_class = dict.fromkeys(HOSTILE, ClassResult(0.5, 0.8, 10))
    write_json(folder / "evaluation.json", replace(SUMMARY, per_class=per_class).to_dict())
    write_json(folder / "machine.json", {name: name for name in HOSTILE})
    config = DetectionConfig(output_dir="</pre><script>", init_from="a\x1b[2J<b>")
    write_text(folder / "config.yaml", config_to_yaml(config))
    record = {"kind": "train", "step": 1, "epoch": 1.0, "loss": 2.0, "loss_$\\frac{$<script>": 1.0, "loss_b": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    html = write_report(folder).read_text(encoding="utf-8")
    assert not set(html) & {"\x1b", "\x00"}
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "onload" not in html.replace("a&quot; onload=&quot;x", "")
    for shown in ("<script>alert(1)</script>", r"caf\udce9\ud800", r"\x1b[2J\x00", r"a\nb"):
        assert shown in page.texts, shown


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("ours")])
def test_a_picture_that_cannot_be_drawn_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def failing(path: Path) -> None:
        raise error

    content = picture(tmp_path / "a.svg", "a picture", failing)
    assert "a.svg was not drawn: log.txt has the reason." in content
    assert f"a.svg was not written: {error}" in caplog.text


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    allowed = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    assert allowed["img-src"] == "data:"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[rule] == f"'sha256-{digest}'"


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_large_picture_is_embedded_smaller(tmp_path: Path, suffix: str) -> None:
    noise = torch.randint(256, (3, 600, 800), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    path = tmp_path / f"noise{suffix}"
    save_picture(path, noise)
    whole = picture(path, "noise")
    limited = picture(path, "noise", limit=50_000)
    kind, content = re.search('data:image/([a-z]+);base64,([^"]+)', limited).groups()
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert (kind, image.format) == ("jpeg", "JPEG")
        assert image.width < 800
        assert abs(image.width / image.height - 4 / 3) < 0.02
    assert 25_000 < len(base64.b64decode(content)) <= 50_000
    assert f"of the size of noise{suffix}" in limited
    assert "of the size" not in whole


def other_run(run_dir: Path, name: str = "other") -> Path:
    """Return another run, with another setting, other results and curves."""
    folder = Path(shutil.copytree(run_dir, run_dir.with_name(name)))
    write_text(folder / "config.yaml", config_to_yaml(DetectionConfig(output_dir="there", seed=5)))
    write_json(folder / "evaluation.json", replace(SUMMARY, AP=0.3333).to_dict())
    return folder


def test_runs_side_by_side(run_dir: Path) -> None:
    """Compare results, settings, curves, classes, costs of errors and pictures; the reports are linked."""
    other, output = other_run(run_dir), run_dir.parent / "both.html"
    write_report(other)
    costs = {kind: {"number": 1, "cost": cost} for kind, cost in (("missed", 0.125), ("class", 0.0625))}
    write_json(other / "errors.json", {"costs": costs})
    assert write_side_by_side([run_dir, other], DETECTION_PAGE, output) == output
    page = Page(output.read_text())
    texts = page.texts
    headings = ("Results", "Settings that differ", "Curves", "Classes", "Errors", "Validation images")
    assert [text for text in texts if text in headings] == [*headings, *headings]  # links, titles
    start = texts.index("AP")
    assert texts[start : start + 3] == ["AP", "0.2754", "0.3333"]
    start = texts.index("seed")
    assert texts[start : start + 3] == ["seed", "42", "5"]
    assert "output_dir" not in texts
    assert "Loss: total" in texts
    start = texts.index("cat & dog")
    assert texts[start : start + 3] == ["cat & dog", "50.0", "50.0"]
    start = texts.index("missed")
    assert texts[start : start + 3] == ["missed", "—", "12.5"]
    assert page.tags.count("img") == 2
    assert [address for address in page.addresses if not address.startswith("data:")] == ["other/report.html"]
    write_side_by_side([other, run_dir], DETECTION_PAGE, output)  # replaces its own page


def test_runs_that_cannot_be_put_side_by_side_are_refused(run_dir: Path) -> None:
    other, output = other_run(run_dir), run_dir.parent / "both.html"
    output.write_text("<p>mine</p>")
    with pytest.raises(InputError, match="has other content and would be replaced"):
        write_side_by_side([run_dir, other], DETECTION_PAGE, output)
    assert output.read_text() == "<p>mine</p>"
    output.unlink()
    with pytest.raises(InputError, match="given twice"):
        write_side_by_side([run_dir, run_dir / "."], DETECTION_PAGE, output)
    with pytest.raises(InputError, match=r"no run folder: config\.yaml is missing"):
        write_side_by_side([run_dir, run_dir / "pictures"], DETECTION_PAGE, output)
    (other / "config.yaml").write_text(config_to_yaml(ClassifierConfig()))
    with pytest.raises(InputError, match="other is a run of the task classification, the first of detection"):
        write_side_by_side([run_dir, other], DETECTION_PAGE, output)
    (other / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    (other / "errors.json").write_text("{}")
    with pytest.raises(InputError, match=r"errors\.json is damaged"):
        write_side_by_side([run_dir, other], DETECTION_PAGE, output)
    more = [other_run(run_dir, f"run {index}") for index in range(7)]
    with pytest.raises(InputError, match="8 runs side by side: at most 7"):
        write_side_by_side([run_dir, *more], DETECTION_PAGE, output)
    assert not output.exists()


def test_the_command_writes_one_report_or_a_page_of_several(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_run(run_dir)
    monkeypatch.chdir(run_dir.parent)
    assert main(["report", "my run"]) == 0
    assert capsys.readouterr().out.strip() == "my run/report.html"
    assert "27.5" in Page((run_dir / "report.html").read_text()).texts
    assert main(["report", str(run_dir), str(other)]) == 0
    assert capsys.readouterr().out.strip() == "runs.html"
    assert "0.3333" in Page(Path("runs.html").read_text()).texts
    assert main(["report", str(run_dir), str(other), "--output", "my run/report.html"]) == 2
    assert "report.html has other content and would be replaced" in capsys.readouterr().err
    assert main(["report", str(run_dir), str(other), "--output", "pages/both.html"]) == 0
    assert Page(Path("pages/both.html").read_text()).addresses[0] == "../my%20run/report.html"
    assert main(["report", str(run_dir), "--output", "pages/one.html"]) == 2
    assert "--output is for several runs" in capsys.readouterr().err
    assert main(["report", "pages"]) == 2
    assert "pages is no run folder: config.yaml is missing" in capsys.readouterr().err
    (other / "report.html").write_text("<p>mine</p>")
    assert main(["report", str(other)]) == 2
    assert "report.html has other content and would be replaced" in capsys.readouterr().err
    assert (other / "report.html").read_text() == "<p>mine</p>"


def test_classifiers_side_by_side(tmp_path: Path) -> None:
    """Their errors have no costs in AP."""
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        folder = tmp_path / name
        write_text(folder / "config.yaml", config_to_yaml(ClassifierConfig()))
        write_json(folder / "errors.json", {"classes": ["cat"], "pairs": []})
        labels = torch.tensor([0, 1, 0, 1])
        evaluator = ClassificationEvaluator(ClassMap((0, 1), ("cat", "dog")), (5, 5))
        guesses = labels if accuracy > 0.5 else labels * 0
        logits = torch.nn.functional.one_hot(guesses, 2).float()
        evaluator.update(LabelledImages(torch.zeros(4, 3, 2, 2), ClassTargets(labels), torch.arange(4)), logits)
        write_json(folder / "evaluation.json", evaluator.summarize().to_dict())
    runs = [tmp_path / "a", tmp_path / "b"]
    page = Page(write_side_by_side(runs, CLASSIFICATION_PAGE, tmp_path / "c.html").read_text())
    start = page.texts.index("top1")
    assert page.texts[start : start + 3] == ["top1", "0.5000", "1.0000"]
    start = page.texts.index("dog")
    assert page.texts[start : start + 3] == ["dog", "0.0", "100.0"]
    assert "Errors" not in page.texts
