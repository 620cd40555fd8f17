"""Arms that a command of the user trains: variables, process, results, records, and what is refused."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from detr_bf.commands import command_main
from detr_bf.common.files import write_json
from detr_bf.comparison import command
from detr_bf.engine import RunFolder, RunMarker
from tests.comparison.conftest import TINY
from tests.comparison.test_runner import state, when

main = command_main("compare")

# Arguments: folder, seed, annotations and what to do. It finds all objects but those of one image.
SCRIPT = """
import fcntl, json, signal, subprocess, sys, time
output, seed, annotations, task = sys.argv[1:5]
truth = json.load(open(annotations))
found = [{key: each[key] for key in ("image_id", "category_id", "bbox")} | {"score": 0.5}
         for each in truth["annotations"] if each["image_id"] != truth["images"][int(seed) % 4 - 2]["id"]]
if task == "ignore":
    signal.signal(signal.SIGTERM, lambda *signal: open(output + "/received", "w").close())
open(output + "/arguments.json", "w").write(json.dumps(sys.argv))
if task == "nothing":
    sys.exit()
if task == "fail":
    print("no memory")
    sys.exit(3)
if task == "child":
    lock = open(output + "/lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fileno()])
if task in ("sleep", "ignore"):
    time.sleep(600)
if task == "work":
    while True: pass
if task == "text":
    found = "text"
if task == "image":
    found[0]["image_id"] = 7777
if task == "category":
    found[0]["category_id"] = 7777
if task == "box":
    found[0]["bbox"] = [0, 0, 1]
if task == "corners":
    found[-1]["bbox"] = [10, 10, 5, -5]
if task == "score":
    found[0]["score"] = "high"
open(output + "/results.json", "w").write("[" if task == "damaged" else json.dumps(found))
"""
LINE = "{python} fake.py {output} {seed} {val_annotations}"


@pytest.fixture
def folder(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a config whose validation images are in a folder with a name that a shell would run, and the command."""
    train, val = coco_folder(num_images=6), coco_folder(num_images=4, name="val; exit 9 $(exit 9)", first_image_id=101)
    text = TINY.replace("{val.images}", '"{val.images}"').replace("{val.annotations}", '"{val.annotations}"')
    (tmp_path / "base.yaml").write_text(text.format(train=train, val=val))
    (tmp_path / "fake.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cell(task: str, *settings: str, output: str = "out", line: str = LINE) -> int:
    """Run the command of a cell in this process."""
    return main(["command", f"{line} {task}", "base.yaml", f"output_dir={output}", "report=false", *settings])


def test_commands_are_compared_and_a_finished_one_is_not_run_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One cell is run in this process, the other by the experiment, each by the command that --print shows."""
    arms = {name: {"command": f"{LINE} {name} {{seconds}}", "seconds": 30} for name in ("one", "two")}
    (folder / "mine.yaml").write_text(json.dumps({"base": "base.yaml", "arms": arms, "seeds": [1], "resamples": 10}))
    assert main(["run", "mine.yaml", "--print", "report=false"]) == 0
    printed = [shlex.split(line) for line in capfd.readouterr().out.splitlines()]
    assert [words[words.index("compare") + 2] for words in printed] == [arms[name]["command"] for name in arms]
    words = printed[0]
    assert main(words[words.index("compare") + 1 :]) == 0
    out = folder / "runs/compare/mine"
    first = state(out / "runs/one/seed_1/output")
    assert main(["run", "mine.yaml", "report=false"]) == 0
    assert state(out / "runs/one/seed_1/output") == first
    records = [json.loads((out / f"cells/{name}/seed_1.json").read_text()) for name in arms]
    assert records[0]["metrics"]["AP"] == records[1]["metrics"]["AP"]
    assert 0.7 < records[0]["metrics"]["AP"] < 0.8, "of four images, one has no detections"
    assert records[1]["settings"]["command"] == arms["two"]["command"]
    assert records[1]["settings"]["seconds"] == 30
    assert 0 < records[1]["cost"]["train_seconds"] < 30
    document = json.loads((out / "comparison.json").read_text())
    assert document["differences"][0]["metrics"]["AP"]["values"] == [0.0]
    assert {"command", "seconds"} & {setting["key"] for setting in document["settings"]} == {"command"}
    assert (out / "index.html").exists()
    assert "two" in (out / "comparison.csv").read_text()
    assert main(["run", "mine.yaml", "report=false", "--discard-weights"]) == 0
    assert not list(out.glob("runs/*/*/output")), "it may hold weights"
    arms["one"]["seconds"] = 40
    (folder / "mine.yaml").write_text(json.dumps({"base": "base.yaml", "arms": arms, "seeds": [1]}))
    assert main(["run", "mine.yaml", "report=false"]) == 2
    assert "seconds: 30.0 there, 40 now" in capfd.readouterr().err


def test_variables_are_arguments_and_no_shell_reads_them(folder: Path) -> None:
    line = (
        "{python} fake.py {output} {seed} {val_annotations} all a{seed}b {val_images} {train_images} "
        "{train_annotations} '{seconds} {minutes}'"
    )
    assert cell("'two words'", "--seconds", "90", "seed=2", line=line) == 0
    given = json.loads((folder / "out/output/arguments.json").read_text())
    val, train = folder / "val; exit 9 $(exit 9)", folder / "train"
    assert given == [
        *("fake.py", str(folder / "out/output"), "2", f"{val}/annotations.json", "all", "a2b", f"{val}/images"),
        *(f"{train}/images", f"{train}/annotations.json", "90 1.5", "two words"),
    ]


def test_data_that_are_no_coco_files_are_written_as_such(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    no_val = ('data.val.images=""', 'data.val.annotations=""')
    assert cell("all", "data.folds=2", "data.fold=1", *no_val) == 0
    written = [json.loads((folder / f"out/output/{split}.json").read_text()) for split in ("train", "val")]
    assert [len(content["images"]) for content in written] == [3, 3]
    assert len(written[1]["annotations"]) == 6
    assert json.loads((folder / "out/evaluation.json").read_text())["num_images"] == 3
    annotations = folder / "train/annotations.json"
    content = json.loads(annotations.read_text())
    annotations.write_text(json.dumps({**content, "images": [each | {"gps": math.nan} for each in content["images"]]}))
    assert cell("all", "data.val_fraction=0.4", *no_val, output="other") == 2
    assert f"{annotations} has values that JSON cannot hold" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("task", "code", "message"),
    [
        ("nothing", 2, "ended without writing"),
        ("damaged", 2, "wrote a file that cannot be read"),
        ("text", 2, "entry 0 is not a detection in COCO's results format"),
        ("box", 2, "entry 0 is not a detection in COCO's results format"),
        ("corners", 2, "entry 5 has a box of negative width or height"),
        ("score", 2, "entry 0 is not a detection in COCO's results format"),
        ("image", 2, "detections for the image ids 7777, which the validation annotations do not list"),
        ("category", 2, "detections for the category ids 7777, which the validation annotations do not list"),
        ("fail", 1, "the command ended with exit code 3"),
        ("work", 1, "took 1 s of processor time, more than"),
        ("sleep", 1, "ran for more than 3 s, 3 times its limit of processor time"),
    ],
)
def test_a_command_without_usable_results_is_refused_and_starts_over(
    folder: Path, task: str, code: int, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if task in ("work", "sleep"):
            patched.setattr(command, "_limit", lambda *arguments: 1)
            patched.setattr(command, "_WALL_FACTOR", 3 if task == "sleep" else 60)
        assert cell(task) == code
    assert message in capfd.readouterr().err
    assert not (folder / "out/evaluation.json").exists()
    assert (folder / "out/output/arguments.json").exists(), "what it has written can be looked at"
    (folder / "out/output/model.pt").write_bytes(b"of the first try")
    assert cell("all") == 0
    assert not (folder / "out/output/model.pt").exists()
    assert cell("fail", "train.epochs=3") == 2, "it is finished, with another command"
    assert "holds a finished run with other settings (command)" in capfd.readouterr().err


def test_files_of_the_user_are_left_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "out/output").mkdir(parents=True)
    (folder / "out/output/mine.txt").write_text("mine")
    assert cell("all") == 2
    assert "holds output, which a run would overwrite" in capfd.readouterr().err
    assert [path.name for path in (folder / "out").rglob("*")] == ["output", "mine.txt"]
    write_json(RunFolder(folder / "run").marker, asdict(RunMarker.of_this_process("training")))
    (folder / "run/output").mkdir()
    (folder / "run/output/results.json").write_text("mine")
    (folder / "run/evaluation.json").write_text("{}")
    before = state(folder / "run")
    assert cell("all", output="run") == 2
    assert "holds another training" in capfd.readouterr().err
    assert {path: content for path, content in state(folder / "run").items() if ".lock" not in path} == before
    assert cell("all", line="nowhere {output}", output="other") == 2
    assert "command: there is no program nowhere" in capfd.readouterr().err
    assert not (folder / "other").exists()


def test_an_output_that_is_no_folder_is_no_result(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link is replaced by a folder, and nothing is removed through it; what cannot be removed is refused."""
    assert cell("fail") == 1
    output, elsewhere = folder / "out/output", folder / "elsewhere"
    output.rename(elsewhere)
    (elsewhere / "results.json").write_text("[]")
    output.symlink_to(elsewhere)
    assert cell("nothing") == 2
    assert "ended without writing" in capfd.readouterr().err
    assert not output.is_symlink()
    assert (elsewhere / "results.json").read_text() == "[]"
    shutil.rmtree(output)
    output.write_text("a file")
    assert cell("all") == 2
    assert "the folder of a command, cannot be removed (Not a directory)" in capfd.readouterr().err
    assert not (folder / "out/evaluation.json").exists()


def test_a_signal_ends_the_command(folder: Path) -> None:
    started = folder / "out/output/arguments.json"
    with when(started.exists, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert cell("sleep") == 128 + signal.SIGTERM
    assert not (folder / "out/evaluation.json").exists()


def test_a_second_signal_does_not_leave_the_command_running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send it to this process when the command has received the first one, and goes on."""
    monkeypatch.setattr("detr_bf.engine.step.SAME_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(command, "_GRACE_SECONDS", 2)
    second: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: second.append(number))
    try:
        started, received = folder / "out/output/arguments.json", folder / "out/output/received"
        with (
            when(started.exists, lambda: os.kill(os.getpid(), signal.SIGTERM)),
            when(received.exists, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        ):
            assert cell("ignore") == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received.exists()
    assert not second


def test_processes_of_a_command_end_with_it(folder: Path) -> None:
    assert cell("child") == 0
    with (folder / "out/output/lock").open() as lock:  # held until they have ended
        for _ in range(500):
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.02)
    pytest.fail("a process of the command still runs")
