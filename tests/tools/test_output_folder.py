"""Files of the user in output_dir are neither removed nor overwritten, and only one run at a time writes there."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from detr_bf.engine import load_checkpoint
from detr_bf.tasks.detection import DetectionTask
from tests.tools.conftest import with_report
from tests.tools.launch import Job, wait_for_steps
from tests.tools.test_train_net import train_net


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_theirs(folder: Path) -> dict[str, bytes]:
    """Write files and folders of the user, with names that look temporary."""
    for name in (".terraform.lock.hcl", ".env.production.local", ".eslintrc.base.json", "notes.md", "model.pt"):
        (folder / name).write_text("theirs")
    (folder / ".cache.x.y").mkdir()
    (folder / ".cache.x.y" / "a").write_text("theirs")
    return contents(folder)


def test_training_in_a_folder_of_the_user_touches_none_of_their_files(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    theirs = save_theirs(work)
    monkeypatch.chdir(work)
    common = ["--config", str(tiny), "output_dir=."]
    assert train_net([*common, "train.max_steps=1"]) == 0
    assert train_net([*common, "train.max_steps=2", "--resume"]) == 0
    assert contents(work).items() >= theirs.items()


def test_bad_input_leaves_what_others_saved_meanwhile(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, check = tmp_path / "run", DetectionTask.check

    def saving(self: DetectionTask) -> None:
        (run / "notes.md").write_text("theirs")
        (run / "last.pt").write_text("another run's")
        check(self)

    monkeypatch.setattr(DetectionTask, "check", saving)
    (tmp_path / "train" / "images" / "0003.png").unlink()
    assert train_net(["--config", str(tiny)]) == 2
    assert contents(run) == {"notes.md": b"theirs", "last.pt": b"another run's"}


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "results.json", "machine.json", "log.txt", "last.pt"])
@pytest.mark.parametrize("arguments", [[], ["--auto-resume"]])
def test_files_of_the_user_with_our_names_are_not_overwritten(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("theirs")
    assert train_net(["--config", str(tiny), *arguments]) == 2
    no_checkpoint = name == "last.pt" and arguments
    assert ("is truncated" if no_checkpoint else f"holds {name}, which a run would") in capsys.readouterr().err
    assert contents(tmp_path / "run") == {name: b"theirs"}


def test_the_copy_of_a_run_can_be_resumed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the marker file, last.pt identifies the folder as a run; without --resume it is refused."""
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 0
    (tmp_path / "run" / "detr_bf-run.json").unlink()
    before = contents(tmp_path / "run")
    assert train_net(["--config", str(tiny), "train.max_steps=2"]) == 2
    assert "if it is the copy of a run that holds its last.pt, give --resume" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before
    assert train_net(["--config", str(tiny), "train.max_steps=2", "--resume"]) == 0


def test_an_evaluation_is_no_run_to_resume(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_net(["--config", str(tiny), "train.max_steps=1", f"output_dir={tmp_path / 'parent'}"]) == 0
    assert train_net(["--config", str(tiny), "--eval-only", f"init_from={tmp_path / 'parent'}"]) == 0
    before = contents(tmp_path / "run")
    for arguments in ([], ["--auto-resume"], ["--resume"]):
        assert train_net(["--config", str(tiny), *arguments]) == 2
        assert "holds an evaluation" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


def test_a_full_disk_at_the_start_is_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("detr_bf.engine.run_folder.write_json", "detr_bf.tasks.run.write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(name, full)
            assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 2
        assert "cannot be written (No space left on device)" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_one_run_at_a_time(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run is refused during a run, with and without --resume; after SIGKILL the folder is free at once."""
    job = Job(tiny, tmp_path / "run", ("train.epochs=1000", "data.workers=1"), processes=1)
    process = job.start()
    wait_for_steps(process, job.folder, 2)
    before = (job.folder / "config.yaml").read_bytes()
    for arguments in ([], ["--resume"], ["--auto-resume"]):
        assert train_net(["--config", str(tiny), *arguments]) == 2
        said = capsys.readouterr().err
        assert re.search(rf"in use by another run \(process {process.pid} on \S+ since 20", said), said
    assert (job.folder / "config.yaml").read_bytes() == before
    assert process.poll() is None, "the first run continues"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = job.folder / "last.pt"  # only previous.pt if the signal came between two renames
    step = load_checkpoint(last if last.exists() else job.folder / "previous.pt").training["progress"]["step"]
    assert train_net(["--config", str(tiny), "train.epochs=1000", f"train.max_steps={step + 2}", "--resume"]) == 0


@pytest.mark.full
def test_one_run_at_a_time_of_torchrun(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", ("train.batch_size=2", "train.epochs=1000"), processes=2)
    process = job.start()
    wait_for_steps(process, job.folder, 1)
    second = replace(job, settings=("train.batch_size=2",)).run()
    assert second.code != 0
    assert second.said.count("in use by another run") == 1, second.said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    marker = json.loads((job.folder / "detr_bf-run.json").read_text())
    assert marker["kind"] == "training"
    done = load_checkpoint(job.folder / "last.pt").training["progress"]["step"]
    again = replace(job, settings=(*job.settings, f"train.max_steps={done + 1}")).run("--resume")
    assert again.code == 0, again.said


def evaluate(config: Path | str, *arguments: str) -> int:
    return train_net(["--config", str(config), "--eval-only", *arguments])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_evaluation_of_a_run_leaves_the_run_as_it_is(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_report(tiny)
    run = tmp_path / "run"
    assert train_net(["--config", str(tiny), "train.max_steps=2"]) == 0
    before = contents(run)

    for _ in range(2):  # the same evaluation in the same folder
        assert evaluate(tiny, "train.max_steps=2") == 0
        assert str(run / "eval-best" / "report.html") in last_line(capsys)
    assert evaluate(tiny, "train.max_steps=2", "eval.max_detections=3") == 0
    assert str(run / "eval-best-2" / "report.html") in last_line(capsys)
    assert evaluate(tiny, f"init_from={run / 'last.pt'}") == 0
    assert str(run / "eval-last" / "report.html") in last_line(capsys)
    after = contents(run)
    assert {name: after[name] for name in before} == before
    folders = {name.split("/")[0] for name in after.keys() - before.keys()}
    assert folders == {"eval-best", "eval-best-2", "eval-last"}
    assert json.loads(after["eval-best/evaluation.json"]) == json.loads(before["evaluation.json"])


@pytest.mark.full
def test_evaluation_of_foreign_weights_has_a_folder_of_its_own(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_report(tiny)
    for name in ("parent", "run"):
        assert train_net(["--config", str(tiny), "train.max_steps=1", f"output_dir={tmp_path / name}"]) == 0
    before = contents(tmp_path / "run")
    assert evaluate(tiny, f"init_from={tmp_path / 'parent'}") == 0
    assert str(tmp_path / "run" / "eval-parent-best" / "report.html") in last_line(capsys)
    assert contents(tmp_path / "run").items() >= before.items()
    assert "parent" in (tmp_path / "run" / "eval-parent-best" / "log.txt").read_text()
    assert evaluate(tiny, f"init_from={tmp_path / 'parent'}", f"output_dir={tmp_path / 'new'}") == 0
    assert str(tmp_path / "new" / "report.html") in last_line(capsys), "a new folder is used itself"
    assert train_net(["--config", str(tiny), f"output_dir={tmp_path / 'new'}"]) == 2
    assert "holds an evaluation" in capsys.readouterr().err


@pytest.mark.full
def test_evaluation_with_the_config_of_a_run_means_that_run_and_not_its_parent(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    assert train_net(["--config", str(tiny), "train.max_steps=1", f"output_dir={parent}"]) == 0
    tuning = ["train.max_steps=5", "optimizer.lr=0.01", f"init_from={parent}", f"output_dir={child}"]
    assert train_net(["--config", str(tiny), *tuning]) == 0
    assert evaluate(child / "config.yaml") == 0
    found = json.loads((child / "eval-best" / "results.json").read_text())
    results = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("parent", "child")}
    assert found == results["child"]
    assert found != results["parent"]
    capsys.readouterr()
    for name in ("last.pt", "best.pt", "previous.pt"):
        (child / name).unlink(missing_ok=True)
    assert evaluate(child / "config.yaml") == 2
    said = capsys.readouterr().err
    assert "nothing to evaluate" in said
    assert f"init_from={parent} in the config file is only the start of training" in said


def test_a_report_that_cannot_be_made_is_a_warning(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_report(tiny)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("detr_bf.tasks.run.write_report", full)
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 0
    said = capsys.readouterr()
    assert "AP 0." in said.out
    assert "no report, see the log" in said.out
    assert "No space left on device" in said.err
    assert (tmp_path / "run" / "evaluation.json").exists()


def test_numbers_that_cannot_be_written_are_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("detr_bf.tasks.detection.write_results", full)
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"the results \(AP 0\.\d+ .*\) cannot be written .*No space left on device", said), said


def test_the_last_line_names_the_last_and_the_best_epoch(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(tiny), "train.epochs=2", "optimizer.lr=0", "optimizer.backbone_lr=0"]) == 0
    assert last_line(capsys).endswith("last epoch 2 (last.pt), best epoch 1 (best.pt) with averaged weights")
