"""Faults around a run: disks, files, data, numbers, clocks. The run continues, or ends with one clear message."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detr_bf.common.structures import Batch
from detr_bf.detectors import Detector
from detr_bf.engine import Checkpoint, load_checkpoint
from detr_bf.engine.recovery import load_capture
from tests.tools import driver
from tests.tools.conftest import TINY
from tests.tools.launch import SETTINGS, Ended, Job, check_same, unfinished
from tests.tools.test_train_net import assert_same, records, tool, train_net

replay: Callable[..., int] = tool("replay_capture").main
slow = pytest.mark.slow
IMAGE = 8  # the broken image: once in every epoch, with one rank and with two


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, like the processes of :class:`Job`, so that sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of killed runs, by the kind of the kill."""
    return {"folder": tmp_path_factory.mktemp("stopped")}


def killed(tiny: Path, stopped: dict[str, Path], folder: Path) -> Job:
    """Copy a run of one process that was killed in its fifth step; made once for all tests."""
    if "run" not in stopped:
        job = Job(tiny, stopped["folder"] / "run", SETTINGS[1], 1, fault="kill:step:0:5")
        assert job.run().code == -9
        stopped["run"] = job.folder
    shutil.copytree(stopped["run"], folder)
    return Job(tiny, folder, SETTINGS[1], 1)


def here(job: Job, *arguments: str) -> int:
    """Run the job in this process."""
    return train_net(["--config", str(job.config), f"output_dir={job.folder}", *job.settings, *arguments])


def progress(folder: Path) -> dict[str, Any]:
    training = load_checkpoint(folder / "last.pt").training
    assert training is not None
    return training["progress"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "more", "message"),
    [
        (1, 100_000, "the checkpoint of step 5 cannot be written"),
        pytest.param(1, 100, "metrics.jsonl cannot be written", marks=slow),
        pytest.param(2, 100_000, "the checkpoint of step 5 cannot be written", marks=slow),
        pytest.param(2, 100, "metrics.jsonl cannot be written", marks=slow),
    ],
)
def test_a_full_disk_stops_the_run_with_a_whole_checkpoint(
    tiny: Path, tmp_path: Path, processes: int, more: int, message: str
) -> None:
    folder = tmp_path / "run"
    job = Job(tiny, folder, SETTINGS[processes], processes, fault=f"small_files:5:{folder / 'metrics.jsonl'}:{more}")
    run = job.run()
    assert run.code == 1, run.said
    assert run.said.count("training stopped: ") == 1
    assert message in run.said
    assert "free some space" in run.said
    assert progress(folder)["step"] == 4
    assert unfinished(folder) == []
    assert job.again("--resume").code == 0
    check_same(job)


FULL = """
mount -t tmpfs -o size=40m none "$1"; folder=$1; copy=$2; shift 2
"$@"; echo "code $?"
mount -o remount,size=200m "$folder"
"$@" --resume; echo "code $?"
cp -r "$folder" "$copy"
"""


@slow
def test_a_small_disk_that_grows(tiny: Path, tmp_path: Path) -> None:
    """The file system has space for three checkpoints but not for the fourth; ``best.pt`` is one of them."""
    unshare = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let users mount file systems")
    (tmp_path / "disk").mkdir()
    shell = (*unshare, "sh", "-c", FULL, "sh", str(tmp_path / "disk"), str(tmp_path / "copy"))
    run = Job(tiny, tmp_path / "disk", SETTINGS[1], 1, before=shell).run()
    assert "the checkpoint of step 3 cannot be written" in run.said, run.said
    assert re.findall("code [0-9]+", run.out) == ["code 1", "code 0"], run.said
    check_same(Job(tiny, tmp_path / "copy", SETTINGS[1], 1))


def cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def flipped(place: float) -> Callable[[bytearray], None]:
    """Return a function that flips one bit, at this fraction of the file."""

    def flip(content: bytearray) -> None:
        content[int(place * (len(content) - 1))] ^= 1 << random.Random(place).randrange(8)

    return flip


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("damage", [cut, flipped(0), flipped(0.3), flipped(0.61803), flipped(0.97)])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    tiny: Path,
    tmp_path: Path,
    stopped: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytearray], None],
) -> None:
    job = killed(tiny, stopped, tmp_path / "run")
    last = job.folder / "last.pt"
    content = bytearray(last.read_bytes())
    damage(content)
    last.write_bytes(content)
    assert here(job, "--resume") == 0
    said = capsys.readouterr().err
    assert f"{last} is" in said
    assert "resumes from the older" in said
    assert "ERROR" in (job.folder / "log.txt").read_text()
    assert "resumed at step 3 of 9" in said
    assert (job.folder / "last.damaged.pt").read_bytes() == content
    check_same(job)


@pytest.mark.usefixtures("one_thread")
def test_a_bit_that_is_never_read_is_no_damage(
    tiny: Path, tmp_path: Path, stopped: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last byte belongs to the length of a ZIP comment that the file does not have."""
    job = killed(tiny, stopped, tmp_path / "run")
    content = bytearray((job.folder / "last.pt").read_bytes())
    flipped(1)(content)
    (job.folder / "last.pt").write_bytes(content)
    assert here(job, "--resume") == 0
    assert "resumed at step 4 of 9" in capsys.readouterr().err
    check_same(job)


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_its_last_checkpoint_goes_on_from_the_one_before(
    tiny: Path, tmp_path: Path, stopped: dict[str, Path]
) -> None:
    job = killed(tiny, stopped, tmp_path / "run")
    (job.folder / "last.pt").unlink()
    assert here(job, "--auto-resume") == 0
    check_same(job)


def test_two_damaged_checkpoints_are_bad_input(
    tiny: Path, tmp_path: Path, stopped: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job = killed(tiny, stopped, tmp_path / "run")
    for name in ("last.pt", "previous.pt"):
        content = bytearray((job.folder / name).read_bytes())
        flipped(0.4)(content)
        (job.folder / name).write_bytes(content)
    before = {path: path.read_bytes() for path in job.folder.iterdir() if path.suffix == ".pt"}
    assert here(job, "--resume") == 2
    assert "previous.pt is" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in job.folder.iterdir() if path.suffix == ".pt"}


def test_a_damaged_checkpoint_is_not_evaluated(
    tiny: Path, tmp_path: Path, stopped: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    best = killed(tiny, stopped, tmp_path / "run").folder / "best.pt"
    content = bytearray(best.read_bytes())
    flipped(0.4)(content)
    best.write_bytes(content)
    arguments = ["--config", str(tiny), "--eval-only", f"output_dir={tmp_path / 'eval'}", f"init_from={best}"]
    assert train_net(arguments) == 2
    assert f"{best} is" in capsys.readouterr().err
    assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=slow)])
def test_an_image_that_breaks_during_training_is_replaced(tiny: Path, tmp_path: Path, processes: int) -> None:
    broken = tmp_path / "train" / "images" / f"{IMAGE:04d}.png"
    settings = (*SETTINGS[processes], "data.max_unreadable=0.1")
    job = Job(tiny, tmp_path / "run", settings, processes, fault=f"broken_image:4:{broken}")
    run = job.run()
    assert run.code == 0, run.said
    assert f"cannot be read: image file {broken} cannot be used" in run.said
    steps = records(job.folder / "metrics.jsonl", "train")
    assert [record["step"] for record in steps] == list(range(1, 10))
    replaced = [record.get("replaced_images", 0) for record in steps]
    assert replaced[:3] == [0, 0, 0]
    assert max(replaced) == 1, "counted per epoch"


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=slow)])
def test_too_many_broken_images_end_the_run(tiny: Path, tmp_path: Path, processes: int) -> None:
    """One of fifteen images is more than the default allows; only one of two ranks reads it."""
    broken = tmp_path / "train" / "images" / f"{IMAGE:04d}.png"
    job = Job(tiny, tmp_path / "run", SETTINGS[processes], processes, fault=f"broken_image:4:{broken}")
    run = job.run()
    assert run.code == 1, run.said
    assert run.said.count("training stopped: ") == 1, run.said
    assert "1 images of this epoch cannot be read, data.max_unreadable allows 0.15" in run.said
    assert str(broken) in run.said
    assert 3 <= progress(job.folder)["step"] < 9


def stopped_at(run: Ended) -> int:
    [step] = re.findall(r"the loss or the gradient of step (\d+) is not finite", run.said)
    return int(step)


@pytest.mark.parametrize(
    ("processes", "what"),
    [
        (1, "gradient"),
        pytest.param(1, "loss", marks=slow),
        *(pytest.param(2, w, marks=slow) for w in ("loss", "gradient")),
    ],
)
def test_a_step_that_is_not_finite_stops_the_run_with_a_capture(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: int,
    what: str,
) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[processes], processes, fault=f"not_finite:{what}:{IMAGE}")
    run = job.run()
    assert run.code == 1, run.said
    assert run.said.count("training stopped: ") == 1, run.said
    step = stopped_at(run)
    [path] = (job.folder / "captures").iterdir()
    assert f"captured in {path}" in run.said
    capture = load_capture(path, lambda config: Batch)
    assert (capture.step, capture.world_size) == (step, processes)
    assert IMAGE in [target.image_id for batch in capture.batches for target in batch.targets]
    assert f"rank {capture.rank}, images " in run.said
    assert f"{IMAGE:04d}.png" in run.said
    assert replay([str(path), "--device", "cpu"]) == 3, "a bug in the code, not a broken file"
    monkeypatch.setattr(Detector, "forward", Detector.forward)  # restored at the end
    driver.not_finite(tmp_path, what, str(IMAGE))
    assert replay([str(path), "--device", "cpu"]) == 0
    assert "REPRODUCED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("processes", "what"),
    [pytest.param(n, what, marks=slow) for what in ("loss", "gradient") for n in (1, 2)],
)
def test_a_skipped_step_changes_nothing(tiny: Path, tmp_path: Path, processes: int, what: str) -> None:
    settings = (*SETTINGS[processes], "train.epochs=1", "train.max_skipped=1")
    job = Job(tiny, tmp_path / "run", settings, processes, fault=f"not_finite:{what}:{IMAGE}")
    run = job.run()
    assert run.code == 0, run.said
    step = stopped_at(run)
    assert "The step is skipped, 1 of 1." in run.said
    assert progress(job.folder)["skipped"] == 1
    steps = records(job.folder / "metrics.jsonl", "train")
    assert [record.get("skipped_steps", 0) for record in steps if record["step"] > step] == [1] * (3 - step)
    other = Job(tiny, tmp_path / "other", settings, processes, fault=f"undone:{step}")
    assert other.run().code == 0
    left_out, undone = (load_checkpoint(each.folder / "last.pt") for each in (job, other))
    for part in ("model", "ema"):
        assert_same(getattr(left_out, part), getattr(undone, part), part)
    for part in ("optimizer", "rng"):
        assert_same(left_out.training[part], undone.training[part], part)


@slow
def test_the_time_of_day_does_not_matter(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[1], 1, fault="wild_clock")
    run = job.run()
    assert run.code == 0, run.said
    check_same(job)


def test_minutes_between_checkpoints_are_those_of_a_clock_that_never_jumps(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 25 seconds of this clock; each save restarts the minute; the ends of epochs save in any case."""
    seconds, saved = 0, []
    forward, save = driver.TrainingStep.forward, Checkpoint.save

    def ticking(*arguments: Any) -> Any:
        nonlocal seconds
        seconds += 25
        return forward(*arguments)

    def noting(self: Checkpoint, path: Path, previous: Path | None = None) -> None:
        saved.append((path.name, self.training["progress"]["step"]))
        save(self, path, previous)

    monkeypatch.setattr(driver.TrainingStep, "forward", ticking)
    monkeypatch.setattr(Checkpoint, "save", noting)
    monkeypatch.setattr("detr_bf.engine.state.time", SimpleNamespace(monotonic=lambda: seconds))
    settings = ["train.epochs=2", "checkpoint.every_steps=100000", "checkpoint.every_minutes=1"]
    assert train_net(["--config", str(tiny), *settings]) == 0
    steps = [step for name, step in saved if name == "last.pt"]
    assert sorted(set(steps)) == [0, 3, 5, 8, 10]


@pytest.fixture
def unequal(tmp_path: Path, panoptic_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a config with masks and panoptic maps, and five validation images: two ranks have unequal shares."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    folders = {"train": panoptic_folder(6, name="train"), "val": panoptic_folder(5, name="val", first_image_id=101)}
    splits = "".join(
        f"  {name}: {{images: {x.images}, annotations: {x.annotations}, panoptic: {x.panoptic}}}\n"
        for name, x in folders.items()
    )
    config = tmp_path / "panoptic.yaml"
    config.write_text(TINY.replace("data:\n", f"data:\n{splits}"))
    return config


MASKS = ("model.masks=true", "eval.panoptic.threshold=0", "train.epochs=1", "train.batch_size=2")


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("again_by", [1, pytest.param(2, marks=slow)])
def test_two_processes_evaluate_as_one_does(unequal: Path, tmp_path: Path, again_by: int) -> None:
    trained = Job(unequal, tmp_path / "trained", MASKS)
    run = trained.run()
    assert run.code == 0, run.said
    source = f"init_from={trained.folder / 'last.pt'}"
    expected = found(trained.folder)
    assert len(json.loads(expected["results.json"])) > 0
    assert len([name for name in expected if name.endswith(".png")]) == 5
    again = Job(unequal, tmp_path / "again", (*MASKS, source), again_by)
    assert (here(again, "--eval-only") if again_by == 1 else again.run("--eval-only").code) == 0
    assert found(again.folder) == expected


def found(folder: Path) -> dict[str, bytes]:
    """Return the result files of an evaluation, by name."""
    names = ("results.json", "evaluation.json", "panoptic.json")
    files = [folder / name for name in names] + sorted((folder / "panoptic").iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train.annotations=/nowhere/train.json"], "/nowhere/train.json"),
        pytest.param(["train.epoch=3"], "unknown key 'train.epoch'", marks=slow),
        pytest.param(["--resume"], "nothing to resume", marks=slow),
        pytest.param(["--eval-only"], "nothing to evaluate", marks=slow),
        pytest.param(["device=cuda:0"], "device", marks=slow),
        pytest.param(["output_dir=/dev/null"], "output_dir /dev/null cannot be written", marks=slow),
    ],
)
def test_bad_input_is_printed_once_by_two_ranks(tiny: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    job = Job(tiny, tmp_path / "run")
    run = job.run(*arguments)
    assert run.code != 0
    assert len(re.findall("^error: ", run.said, re.MULTILINE)) == 1, run.said
    assert message in run.said
    assert run.said.count("Traceback") == 1, "torchrun's own message"
    assert not job.folder.exists()


@pytest.mark.full
def test_bad_input_is_printed_although_the_main_rank_starts_last(tiny: Path, tmp_path: Path) -> None:
    """torchrun ends all processes as soon as one has ended."""
    job = Job(tmp_path / "nowhere.yaml", tmp_path / "run", fault="late:0:2")
    run = job.run()
    assert run.code != 0
    assert len(re.findall("^error: config file not found", run.said, re.MULTILINE)) == 1, run.said
