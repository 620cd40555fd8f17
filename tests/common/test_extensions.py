"""Files with parts of the user's own: the example of the guide, and the conditions under which they are executed."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import detr_bf
from detr_bf.batchformer import BATCH_MIXERS
from detr_bf.commands import main
from detr_bf.common import extensions
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import extended, use_plugins
from detr_bf.config import config_from_dict, config_to_dict, load_config
from detr_bf.data.transforms import TRANSFORMS
from detr_bf.engine import load_checkpoint
from detr_bf.losses import LOGGED_METRICS, MATCHING_COSTS
from detr_bf.tasks import task_of
from tests.tools.conftest import tiny  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "batch_attention.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## A part of your own")[2].partition("\n## ")[0]
SHORT = """
from detr_bf.data.transforms import TRANSFORMS

@TRANSFORMS.register("same")
def same(sample):
    return sample
"""


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget the files that were named before; the result does it again."""
    monkeypatch.delenv(extensions.VARIABLE, raising=False)

    def forget() -> None:
        monkeypatch.setattr(extensions, "_named", {})
        extensions._warn_of_other_content.cache_clear()

    forget()
    return forget


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """Write both files of the guide, mine.py and mine.yaml, and return the first."""
    [code], [settings] = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("python", "yaml"))
    path = tmp_path / "mine.py"
    path.write_text(code)
    (tmp_path / "mine.yaml").write_text(settings.replace("mine.py", str(path)))
    yield path
    for registry in (BATCH_MIXERS, TRANSFORMS, LOGGED_METRICS, MATCHING_COSTS):
        assert not registry.files, "nothing stays registered"
        assert {"mean", "grey", "highest_score", "centres"}.isdisjoint(registry)


def test_the_example_of_the_guide(
    tiny: Path,  # noqa: F811
    mine: Path,
    nothing_named: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = mine.parent / "run"
    command = ["train", str(tiny), str(mine.with_suffix(".yaml")), "train.epochs=1", f"output_dir={run}"]
    assert main(command) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("highest_score" in record for record in records if record["kind"] == "train")
    checkpoint = load_checkpoint(run / "last.pt")
    stored = checkpoint.config["plugins"]["files"]
    [name, digest] = stored[0].split("@sha256:")
    assert (name, len(stored), len(digest)) == ("mine.py", 1, 64)
    assert "encoder.batch_former.mixers.shared.project.weight" in checkpoint.model

    # a stored name is not enough
    nothing_named()
    monkeypatch.chdir(mine.parent)
    said = rf"mine\.py with the SHA-256 {digest} is needed.* DETR_BF_PLUGINS=DIR/mine\.py.*use_plugins"
    with pytest.raises(InputError, match=said):
        detr_bf.load(run, "cpu")
    monkeypatch.setenv("DETR_BF_PLUGINS", str(mine))
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    before = detr_bf.load(run, "cpu")(image, 0).scores
    monkeypatch.delenv("DETR_BF_PLUGINS")

    # another content is told
    nothing_named()
    mine.write_text(mine.read_text() + "\n# changed\n")
    detr_bf.use_plugins(mine)
    assert "is not the file that was used in training" not in capsys.readouterr().err
    assert torch.equal(detr_bf.load(run, "cpu")(image, 0).scores, before)
    assert capsys.readouterr().err.count("mine.py is not the file that was used in training: its SHA-256 is ") == 1


def test_parts_reach_model_and_loss(mine: Path) -> None:
    small = ["model.backbone={weights: none, name: resnet18}", "model.encoder_layers=1", "model.decoder_layers=1"]
    small += ["model.hidden_dim=32", "model.heads=2", "model.feedforward_dim=32", "batch_former.heads=2"]
    config = load_config(mine.with_suffix(".yaml"), small)
    task = task_of(config)
    criterion = task.build_criterion(task.build_model(3))
    assert {"class_error", "highest_score"} < set(criterion.metrics)  # type: ignore[attr-defined]
    [(name, _, factor)] = criterion.matcher._added  # type: ignore[attr-defined]
    assert (name, factor) == ("centres", 2)
    task.check_settings()
    for setting in ("plugins.files=[]", "batch_former.mixer=other", "loss.matcher.extra={other: 1}"):
        with pytest.raises(InputError, match=r"must be one of .*; got '.*plugins\.files=\[FILE\.py\] names"):
            task_of(load_config(mine.with_suffix(".yaml"), [*small, setting])).check_settings()
    with pytest.raises(InputError, match=r"loss\.matcher\.extra must be names with factors from 0"):
        load_config(mine.with_suffix(".yaml"), ["loss.matcher.extra.centres=-1"])


def test_a_stored_config_names_no_file(mine: Path) -> None:
    """Neither a path nor a name with a hash in a stored config is executed; an override is the user's."""
    mine.write_text(f"{SHORT}\nraise SystemExit")
    tree = config_to_dict(load_config(None, ["data.transforms.extra=[same]"]))
    for entry in (str(mine), "mine.py@sha256:0"):
        tree["plugins"]["files"] = [entry]
        with pytest.raises(InputError, match=r"the file mine\.py .*is needed"):
            task_of(config_from_dict(tree)).build_criterion(torch.nn.Identity())
    config = config_from_dict(tree, [f"plugins.files=[{mine}]"])
    with pytest.raises(InputError, match=r"mine\.py, line 8: SystemExit"):
        task_of(config).build_criterion(torch.nn.Identity())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = = 1", "line 1: SyntaxError: invalid syntax"),
        ("\nx = 1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("x = 1", r"registers nothing: put a decorator such as @BATCH_MIXERS\.register"),
        (SHORT.replace('"same"', '"vertical_flip"'), "there is a transform 'vertical_flip' already"),
        (SHORT.replace('"same"', '"a b"'), "the name of a transform must be an identifier, got 'a b'"),
        ("\0", "null bytes"),
    ],
)
def test_a_file_that_fails(code: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(InputError, match=said), extended(use_plugins(path)):
        pass


def test_files_that_cannot_be_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.py", tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(InputError, match=r"is not a Python file \(\.py\); a relative path starts at"):
            load_config(None, [f"plugins.files=[{path}]"])
    with pytest.raises(InputError, match="each with another name"):
        load_config(None, ["plugins.files=[a/mine.py, b/mine.py]"])
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(SHORT)
    both = use_plugins(tmp_path / "one.py", tmp_path / "two.py")
    with pytest.raises(InputError, match="two files register the transform 'same'"), extended(both):
        pass
    assert "same" not in TRANSFORMS


@pytest.mark.full
def test_a_worker_that_is_not_forked_gets_the_transform(tmp_path: Path) -> None:
    from detr_bf.data.transforms import _Registered

    path = tmp_path / "mine.py"
    path.write_text(SHORT)
    with extended(use_plugins(path)):
        found = _Registered("same")
    (tmp_path / "pickled").write_bytes(pickle.dumps([found, _Registered("vertical_flip")]))
    code = "import pickle, sys; print(*(x.name for x in pickle.load(open(sys.argv[1], 'rb'))))"
    command = [sys.executable, "-c", code, str(tmp_path / "pickled")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "same vertical_flip\n"
