"""Figures and report page of a masked autoencoder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

from detr_bf.classification.metrics import ReconstructionResult
from detr_bf.classification.report.page import MASKED_PAGE
from detr_bf.classification.report.sheet import reconstruction_sheet
from detr_bf.config import MaskedConfig, config_to_yaml
from detr_bf.errors import InputError
from detr_bf.files import write_json, write_text
from detr_bf.report import save_picture, write_report
from tests.report.page import Page


def pictures(count: int, value: int) -> torch.Tensor:
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


def test_the_sheet_grows_by_lines(tmp_path: Path) -> None:
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
def test_the_page(tmp_path: Path, enabled: bool) -> None:
    config = MaskedConfig()
    config.batch_former.enabled = enabled
    write_text(tmp_path / "config.yaml", config_to_yaml(config))
    write_text(tmp_path / "metrics.jsonl", json.dumps({"kind": "train", "step": 7, "epoch": 1, "loss": 2.0}) + "\n")
    write_json(tmp_path / "evaluation.json", ReconstructionResult(0.12345, 1000).to_dict())
    save_picture(tmp_path / "pictures" / "validation.png", reconstruction_sheet(*[pictures(1, 9)] * 3))
    page = Page(write_report(tmp_path, MASKED_PAGE).read_text())
    assert page.tags.count("img") == 2
    assert "0.1235" in page.texts
    everything = " ".join(page.texts)
    assert "Masked autoencoder of vit_base_patch16_224, 75 % of the patches masked." in everything
    plugin = "with BatchFormerV2 before all blocks of its decoder" if enabled else "without plug-ins"
    assert f"Decoder of 8 blocks, {plugin}." in everything
    assert "Mean squared error over the masked patches of 1,000 images." in everything
    assert "Classes" not in page.texts


def test_what_is_missing_or_not_finite_is_said(tmp_path: Path) -> None:
    write_text(tmp_path / "config.yaml", config_to_yaml(MaskedConfig()))
    write_json(tmp_path / "evaluation.json", ReconstructionResult(None, 5, 1).to_dict())
    texts = Page(write_report(tmp_path, MASKED_PAGE).read_text()).texts
    assert any("That of 1 image is not finite." in text for text in texts)
    for name in ("metrics.jsonl", "pictures/validation.png", "machine.json"):
        assert any(name in text and "missing" in text for text in texts), name
