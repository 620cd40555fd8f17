"""Report pages in a headless browser: no error, no request, all widths, both colour schemes, sorting and pointer.

The tests need playwright (``pip install 'detr_bf[browser]'``) and Chromium (Debian's package ``chromium``, or its path
in ``DETR_BF_CHROMIUM``). Screenshots are kept in the folder ``DETR_BF_SCREENSHOTS``, if it is set.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detr_bf.common.files import SUSPECTS_FILE, WORST_FILE, write_json, write_text
from detr_bf.comparison.page import write_page
from detr_bf.config import DetectionConfig, config_to_yaml
from detr_bf.report import DETECTION_PAGE, save_picture, write_report, write_side_by_side
from tests.comparison.test_page import document
from tests.report.test_error_sections import content
from tests.report.test_html import SUMMARY

pytestmark = pytest.mark.slow
CHROMIUM = os.environ.get("DETR_BF_CHROMIUM") or shutil.which("chromium")
SCREENSHOTS = os.environ.get("DETR_BF_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the report of a run with all sections, of two runs side by side, and of a comparison."""
    run = tmp_path_factory.mktemp("reports") / "run"
    records = [
        {"kind": "train", "step": step, "epoch": step / 20, "loss": 9 / step, "loss_ce": 1 / step, "lr/all": 1e-3}
        for step in range(1, 201)
    ]
    records += [
        {"kind": "val", "step": 20 * epoch, "epoch": epoch, "AP": epoch / 20, "AP50": epoch / 11, "score": epoch / 20}
        for epoch in range(1, 11)
    ]
    write_text(run / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write_text(run / "config.yaml", config_to_yaml(DetectionConfig()))
    write_json(run / "evaluation.json", SUMMARY.to_dict())
    write_json(run / "machine.json", {"CPU": "fast", "torch": "2.15.0"})
    write_json(run / "errors.json", content())
    noise = torch.randint(256, (3, 900, 1800), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for name in ("pictures/validation.png", WORST_FILE, SUSPECTS_FILE):
        save_picture(run / name, noise)
    other = Path(shutil.copytree(run, run.with_name("other")))
    write_json(other / "evaluation.json", replace(SUMMARY, AP=0.5).to_dict())
    found = {"run": write_report(run)}
    write_report(other)
    found["side by side"] = write_side_by_side([run, other], DETECTION_PAGE, run.parent / "both.html")
    found["comparison"] = write_page(document(5, 5), run.parent / "comparison")
    assert all(page.stat().st_size < 8_000_000 for page in found.values())
    return found


NAMES = ("run", "side by side", "comparison")


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a page; fail if it logs something or asks for anything but itself."""
    name, width, scheme = request.param
    view = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    logged: list[str] = []
    requested: list[str] = []
    view.on("console", lambda message: logged.append(message.text))
    view.on("pageerror", lambda error: logged.append(str(error)))
    view.on("request", lambda request: requested.append(request.url))
    view.goto(pages[name].as_uri())
    yield view
    assert logged == []
    assert [url for url in requested if not url.startswith("data:")] == [pages[name].as_uri()]
    view.close()


def variants(*names: str) -> pytest.MarkDecorator:
    views = ((1280, "light"), (700, "light"), (390, "light"), (390, "dark"))
    return pytest.mark.parametrize(
        "opened", [(name, *view) for name in names for view in views], indirect=True, ids=str
    )


@variants(*NAMES)
def test_the_page_fits_the_window(opened: Any, request: pytest.FixtureRequest) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.evaluate(
        "[...document.querySelectorAll('figure img')].every((image) => image.complete && image.naturalWidth > 0)"
    )
    assert opened.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].every((a) => document.getElementById(a.hash.slice(1)))"
    )
    links = opened.evaluate("[...document.querySelectorAll('a:not([href^=\"#\"])')].map((a) => a.href)")
    assert all(Path(link.removeprefix("file://")).is_file() for link in links)
    for link in opened.locator("nav a").all()[1:3]:  # the last sections cannot be scrolled to the top
        link.click()
        heading = opened.locator(f"{link.get_attribute('href')} h2").bounding_box()
        bar = opened.locator("nav").bounding_box()
        assert bar["y"] == 0
        assert bar["height"] - 20 <= heading["y"] < bar["height"] + 60, "the heading has 20 pixels above its text"
    if SCREENSHOTS:
        name, width, scheme = request.node.callspec.params["opened"]
        file = Path(SCREENSHOTS) / f"{name.replace(' ', '_')}_{width}_{scheme}.png"
        opened.screenshot(path=file, full_page=True)


@variants(*NAMES)
def test_a_table_that_is_cut_shows_it(opened: Any) -> None:
    """The tables of classes fit a telephone, and others have a shadow at the cut side."""
    wide = opened.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth)"
        ".map((box) => [box.getAttribute('aria-label'), getComputedStyle(box).backgroundAttachment])"
    )
    assert all(name != "Class" and "local" in attachment for name, attachment in wide), wide


@variants("run", "comparison")
def test_text_can_be_read(opened: Any) -> None:
    """The contrast of all text outside of pictures is at least 4.5 (WCAG 2.2, level AA)."""
    ratios = opened.evaluate(CONTRAST)
    assert len(ratios) > 50
    assert min(ratios.values()) >= 4.5, min(ratios.items(), key=lambda item: item[1])


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.querySelectorAll("main *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const [one, other] = [light(ink), light(paper(element))].sort((a, b) => b - a);
    found[element.tagName + " " + element.textContent.trim().slice(0, 40)] = (one + 0.05) / (other + 0.05);
  }
  return found;
}"""


@pytest.mark.parametrize("opened", [("run", 1280, "light")], indirect=True)
def test_a_table_sorts_by_each_column(opened: Any) -> None:
    table = opened.locator("#classes table").first

    def column(index: int) -> list[str]:
        return table.locator(f"tbody tr > :nth-child({index})").all_inner_texts()

    names = column(1)
    assert names == ["cat & dog", "<script>alert(1)</script>", "absent"]
    table.get_by_role("button", name="Objects").click()
    assert column(5) == ["1,044", "12", "0"]
    assert table.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name="Objects").click()
    assert column(5) == ["0", "12", "1,044"]
    table.get_by_role("button", name="AP", exact=True).click()
    table.get_by_role("button", name="AP", exact=True).click()
    assert column(3) == ["10.0", "50.0", "—"], "rows without a number are last"
    table.get_by_role("button", name="Class").click()
    assert column(1) == sorted(names)


@pytest.mark.parametrize("opened", [("run", 1280, "light"), ("run", 390, "dark")], indirect=True, ids=str)
def test_a_picture_is_enlarged_and_closed(opened: Any) -> None:
    opened.locator("#validation-images .enlarge").click()
    assert opened.evaluate("document.querySelector('dialog').open")
    assert opened.evaluate("document.querySelector('dialog img').getBoundingClientRect().width") >= 1280
    opened.keyboard.press("Escape")
    assert not opened.evaluate("document.querySelector('dialog').open")


@pytest.mark.parametrize("opened", [("run", 1280, "light")], indirect=True)
def test_the_pointer_shows_the_values_in_all_charts_of_a_group(opened: Any) -> None:
    charts = opened.locator("#curves .chart")
    area = charts.nth(0).locator(".area").bounding_box()
    before = charts.nth(0).locator(".legend").inner_text()
    opened.mouse.move(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    for index in range(charts.count()):
        assert charts.nth(index).locator("figcaption span").inner_text() == "epoch 5"
    last = charts.last.locator(".legend").inner_text()
    assert "AP 25" in last.replace("\n", " ")
    loss = np.mean([9 / step for step in range(93, 101)])  # the mean of the last eight, at step 100
    shown = charts.nth(0).locator(".legend b").first.inner_text()
    assert float(shown) == pytest.approx(loss, rel=1e-3)
    opened.mouse.move(5, 5)
    assert charts.nth(0).locator(".legend").inner_text() == before
    charts.nth(0).locator("svg").focus()
    opened.keyboard.press("ArrowLeft")
    assert charts.last.locator("figcaption span").inner_text() == "epoch 4.8", "one step from the last place"
