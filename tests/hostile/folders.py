"""Output folders: foreign files, unusual paths, resumed and concurrent runs; files of the user stay untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import fixtures
from tests.hostile.annotations import detection, train
from tests.hostile.battery import DISAGREE, NEXT_COMMAND, Build, Case, CaseFiles, fork
from tests.hostile.checkpoints import LOGGED
from tests.hostile.classifiers import classify
from tests.hostile.images import predict

OURS = (  # files that a run writes
    *("config.yaml", "report.html", "results.json", "evaluation.json", "machine.json", "metrics.jsonl", "log.txt"),
    "cost.json",
    *("last.pt", "best.pt", "previous.pt", "pictures/validation.png", "pictures/mine.jpg"),
)
DOTFILES = {
    ".terraform.lock.hcl": "provider {}\n",
    ".env.production.local": "KEY=value\n",
    ".eslintrc.base.json": "{}\n",
    ".last.abc.pt": "mine\n",
    ".config.old.yaml": "mine: 1\n",
    "notes.md": "mine\n",
    "photos/holiday.jpg": "not ours\n",
    "train_images/0001.png": "not ours\n",
    "eval-notes.txt": "mine\n",
    "last.pt.bak": "mine\n",
}


def dotfolders(files: CaseFiles, folder: str) -> None:
    for name in (".cache.d.partial", ".git.lock.d", ".venv.3.12"):
        files.write(f"{folder}/{name}/inside", "mine\n")


def training(prepare: Callable[[CaseFiles], Any], *settings: str, output: str = "run") -> Build:
    """Train the detector of the fixtures with a prepared output folder."""

    def build(files: CaseFiles) -> Callable[[], int]:
        prepare(files)
        return lambda: train(files.fixtures / "detector.yaml", f"output_dir={output}", *settings)

    return build


def holding(*names: str, folder: str = "run") -> Callable[[CaseFiles], None]:
    def prepare(files: CaseFiles) -> None:
        for name in names:
            files.write(f"{folder}/{name}", f"my own {name}\n")

    return prepare


def dotfiles(folder: str) -> Callable[[CaseFiles], None]:
    def prepare(files: CaseFiles) -> None:
        for name, content in DOTFILES.items():
            files.write(f"{folder}/{name}", content)
        dotfolders(files, folder)

    return prepare


def run_of_ours(files: CaseFiles) -> None:
    files.copy("detector", "run")


def run_with_dotfiles(files: CaseFiles) -> None:
    run_of_ours(files)
    dotfiles("run")(files)


def link(name: str, target: str, folder: str = "run") -> Callable[[CaseFiles], None]:
    """An output file is a link to a file of the user."""

    def prepare(files: CaseFiles) -> None:
        files.write(target, "precious\n")
        (files.folder / folder).mkdir(exist_ok=True)
        (files.folder / folder / name).symlink_to(files.folder / target)

    return prepare


def second_run(files: CaseFiles) -> Callable[[], int]:
    """A second run starts in the folder of a live one."""
    return _beside_a_live_run(files, [])


def resumed_beside_a_live_run(files: CaseFiles) -> Callable[[], int]:
    run_of_ours(files)
    return _beside_a_live_run(files, ["--resume", "train.epochs=2"], ["--resume", "train.epochs=100000"])


def _beside_a_live_run(files: CaseFiles, arguments: list[str], first: list[str] | None = None) -> Callable[[], int]:
    config = str(files.fixtures / "detector.yaml")
    command = [config, "output_dir=run", *(first or ["train.epochs=100000", "checkpoint.every_steps=1"])]
    child = fork()
    if child == 0:  # a separate process, ended with the case
        os.dup2(os.open(files.base / "tmp" / "live.log", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(1, 2)
        code = 1
        try:
            code = train(Path(command[0]), *command[1:])
        finally:
            os._exit(code)
    end = time.monotonic() + 50
    lines = files.folder / "run" / "metrics.jsonl"
    before = lines.stat().st_size if lines.exists() else 0
    while not (lines.exists() and lines.stat().st_size > before):
        if time.monotonic() > end or os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("the first run did not start")
        time.sleep(0.05)
    os.kill(child, __import__("signal").SIGSTOP)  # keeps its lock and changes nothing
    os.waitpid(child, os.WUNTRACED)  # it has stopped
    return lambda: train(Path(config), "output_dir=run", *arguments)


def killed_run(files: CaseFiles) -> Callable[[], int]:
    """The lock of a killed run is released."""
    script = (
        "import os, signal, sys\n"
        "from detr_bf.engine import metrics\n"
        "metrics.MetricsLog.__init__ = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from tools.train_net import main\n"
        "main(sys.argv[1:])\n"
    )
    config = str(files.fixtures / "detector.yaml")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, "--config", config, "output_dir=run"]
    subprocess.run(
        command, cwd=files.folder, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, check=False
    )
    return lambda: train(Path(config), "output_dir=run")


def evaluation(prepare: Callable[[CaseFiles], Any], *settings: str) -> Build:
    return training(prepare, "--eval-only", *settings)


def eval_with_own_config(files: CaseFiles) -> Callable[[], int]:
    """Evaluation of a fine-tuned run with its config.yaml uses the weights of this run."""
    command = files.fixtures / "detector.yaml"
    settings = [f"init_from={files.fixtures}/detector", "output_dir=run", "optimizer.lr=0.1"]

    def call() -> int:
        code = train(command, *settings)
        print(NEXT_COMMAND, flush=True)
        trained = json.loads((files.folder / "run" / "evaluation.json").read_text())
        again = train(files.folder / "run" / "config.yaml", "--eval-only")
        found = list((files.folder / "run").glob("eval*/evaluation.json"))
        if code or again or len(found) != 1 or json.loads(found[0].read_text()) != trained:
            print(f"trained {code}, evaluated {again}, results {found}")
            return DISAGREE
        return 0

    return call


def missing_output(files: CaseFiles) -> Callable[[], int]:
    config = detection(files)
    config.write_text("\n".join(line for line in config.read_text().splitlines() if not line.startswith("output_dir")))
    return lambda: train(config, "output_dir=")


def predicting(prepare: Callable[[CaseFiles], Any], output: str, *inputs: str) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        prepare(files)
        images = inputs or (str(files.fixtures / "val" / "images"),)
        return lambda: predict(files.fixtures / "detector", "--output", output, *images)

    return build


def photos(files: CaseFiles) -> None:
    for name in ("one.png", "two.png"):
        (files.folder / "photos").mkdir(exist_ok=True)
        fixtures.picture().save(files.folder / "photos" / name)


def nothing(files: CaseFiles) -> None:
    """Leave the folder as it is."""


def full_disk(files: CaseFiles) -> None:
    """Limit files to a few kilobytes, as on a full disk."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def on_a_full_disk(call: Callable[[CaseFiles], int]) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        def run() -> int:
            full_disk(files)
            return call(files)

        return run

    return build


def _convert(files: CaseFiles) -> int:
    from tools.convert_checkpoint import main

    return main([str(files.fixtures / "detector"), "out.pt"])


def _samples(files: CaseFiles) -> int:
    from tools.make_sample_data import main

    return main(["scenes", "--output", "made", "--num-train", "2", "--num-val", "1", "--image-size", "512"])


BAD_OUTPUTS = {
    "a file": "notes.md",
    "below a file": "notes.md/run",
    "in /proc": "/proc/hostile",
    "in /dev/null": "/dev/null/run",
    "of 300 letters": "r" * 300,
    "of 10,000 letters": "r" * 10_000,
    "with NUL": "a\0b",
    "with an escape in /proc": "/proc/\x1b]0;owned\x07\nFORGED\n",
    "of a surrogate in /proc": "/proc/\udcff",
}


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "folders"
    for name in OURS:
        yield Case(group, f"training beside a foreign {name}", training(holding(name)), says=("run",))
    for name in ("config.yaml", "report.html", "evaluation.json", "log.txt"):
        yield Case(
            group,
            f"evaluation beside a foreign {name}",
            evaluation(holding(name), "init_from=run_of_mine.pt"),
            says=("run",),
        )
        linked = training(link(name, "elsewhere/precious.txt"))
        yield Case(group, f"training over a link called {name}", linked, says=("run",))
    yield Case(
        group,
        "training beside files of the user's",
        training(dotfiles("run")),
        codes=(0,),
        writes=("run",),
        leaves=("run/report.html",),
    )
    here = (
        "config.yaml",
        "report.html",
        "results.json",
        "evaluation.json",
        "machine.json",
        "metrics.jsonl",
        "cost.json",
        "log.txt",
        "launch.txt",
        "detr_bf-run.json",
        "*.pt",
        "pictures",
        ".detr_bf*",
        "*.lock",
        "best*",
    )
    yield Case(
        group,
        "training in the working directory",
        training(dotfiles("."), output="."),
        codes=(0,),
        writes=here,
        leaves=("report.html",),
    )
    yield Case(
        group,
        "bad input in the working directory",
        training(dotfiles("."), "init_from=nowhere.pt", output="."),
        says=("nowhere.pt",),
    )
    yield Case(
        group,
        "bad input beside files of the user's",
        training(dotfiles("run"), "data.train.annotations=nowhere.json"),
        says=("nowhere.json",),
    )
    yield Case(
        group,
        "bad input leaves no folder",
        training(nothing, "init_from=nowhere.pt", output="a/b/c"),
        says=("nowhere.pt",),
    )
    yield Case(group, "training where a run is", training(run_of_ours), says=("run",))
    yield Case(
        group,
        "resuming beside files of the user's",
        training(run_with_dotfiles, "--resume", "train.epochs=2"),
        codes=(0,),
        rewrites=_run_files(),
    )
    yield Case(group, "resuming where nothing is", training(nothing, "--resume"), says=("resume",))
    yield Case(group, "resuming where other files are", training(dotfiles("run"), "--resume"), says=("resume",))
    yield Case(
        group,
        "resuming with another model",
        training(run_of_ours, "--resume", "model.hidden_dim=8", "train.epochs=2"),
        says=("hidden_dim|architecture|shape",),
        rewrites=LOGGED,
    )
    yield Case(
        group,
        "resuming with damaged metrics",
        training(damaged_metrics, "--resume", "train.epochs=2"),
        codes=(0, 2),
        rewrites=_run_files(),
        says=("metrics.jsonl",),
    )
    yield Case(group, "resuming and evaluating", training(run_of_ours, "--resume", "--eval-only"), says=("--resume",))
    yield Case(group, "resuming twice over", training(run_of_ours, "--resume", "--auto-resume"), says=("--resume",))
    yield Case(
        group,
        "resuming a detector as a classifier",
        as_classifier,
        says=("detect|task|Config|classifi",),
        rewrites=LOGGED,
    )
    yield Case(
        group,
        "evaluating a trained run",
        evaluation(run_of_ours),
        codes=(0,),
        writes=("run/eval*",),
        leaves=("run/eval*/evaluation.json",),
    )
    yield Case(
        group,
        "evaluating other weights in a run",
        evaluating_others,
        codes=(0,),
        writes=("run/eval*",),
        leaves=("run/eval*/evaluation.json",),
    )
    yield Case(group, "evaluating a run with its own config", eval_with_own_config, codes=(0,), writes=("run",))
    yield Case(group, "evaluating nothing", evaluation(nothing), says=("run",))
    yield Case(group, "a second run", second_run, says=("run",), writes=("run",))
    yield Case(group, "resuming beside a live run", resumed_beside_a_live_run, says=("run",), writes=("run",))
    yield Case(group, "a run that was killed", killed_run, codes=(0,), rewrites=("run",))
    for name, path in BAD_OUTPUTS.items():
        word = path[:4] if path.isprintable() else "output|proc|null byte|NUL"  # naming the path
        yield Case(group, f"output_dir {name}", training(nothing, output=path), says=(word,))
        yield Case(group, f"predict --output {name}", predicting(nothing, path), says=(word,))
    yield Case(
        group,
        "output_dir is a link to itself",
        training(lambda files: (files.folder / "run").symlink_to("run")),
        says=("output_dir",),
    )
    yield Case(
        group,
        "output_dir is a pipe",
        training(lambda files: os.mkfifo(files.folder / "run")),
        says=("output_dir",),
    )
    yield Case(group, "output_dir is empty", missing_output, codes=(0, 2), writes=here)
    yield Case(group, "output_dir is the home", home, codes=(0,), writes=())
    yield Case(group, "folders called as outputs", training(folders_of_ours), says=("run",))
    yield from _tools(group)


def _run_files() -> tuple[str, ...]:
    """Return the files that resuming may change in the folder ``run``."""
    names = ("config.yaml", "report.html", "results.json", "evaluation.json", "machine.json", "metrics.jsonl")
    more = (
        "cost.json",
        "log.txt",
        "launch.txt",
        "detr_bf-run.json",
        "last.pt",
        "best.pt",
        "previous.pt",
        "pictures",
        ".detr_bf*",
        "*.lock",
        "metrics*",
    )
    return tuple(f"run/{name}" for name in (*names, *more))


def _tools(group: str) -> Iterator[Case]:
    yield Case(
        group,
        "predict into the working directory",
        predicting(photos, ".", "photos"),
        codes=(0,),
        writes=("predictions.json", "0*.png", ".detr_bf*"),
        leaves=("predictions.json",),
    )
    yield Case(
        group,
        "predict into the folder of the photos",
        predicting(photos, "photos", "photos"),
        codes=(0,),
        writes=("photos/predictions.json", "photos/0*.png", "photos/.detr_bf*"),
        leaves=("photos/predictions.json",),
    )
    yield Case(
        group, "predict nothing leaves no folder", predicting(nothing, "found", "nowhere.jpg"), says=("nowhere.jpg",)
    )
    for name, call in {
        "training": lambda files: train(files.fixtures / "detector.yaml", "output_dir=run"),
        "prediction": lambda files: predict(
            files.fixtures / "detector",
            "--output",
            "run",
            files.fixtures / "val" / "images",
        ),
        "conversion": _convert,
        "sample data": _samples,
    }.items():
        yield Case(
            group,
            f"full disk: {name}",
            on_a_full_disk(call),
            codes=(1, 2),
            writes=("run",) if name in ("training", "prediction") else (),
        )


def damaged_metrics(files: CaseFiles) -> None:
    run_of_ours(files)
    files.write("run/metrics.jsonl", b'{"kind": "train", "step": 1}\n[1]\n{broken\n\xff\xfe\n5\n{"kind": "val"')


def folders_of_ours(files: CaseFiles) -> None:
    for name in ("config.yaml", "last.pt", "log.txt"):
        (files.folder / "run" / name).mkdir(parents=True)


def as_classifier(files: CaseFiles) -> Callable[[], int]:
    run_of_ours(files)
    return lambda: classify(files.fixtures / "classifier.yaml", "output_dir=run", "--resume")


def evaluating_others(files: CaseFiles) -> Callable[[], int]:
    run_of_ours(files)
    other = files.copy(
        "detector/previous.pt" if (files.fixtures / "detector/previous.pt").exists() else "detector/last.pt",
        "other.pt",
    )
    return lambda: train(files.fixtures / "detector.yaml", "output_dir=run", f"init_from={other}", "--eval-only")


def home(files: CaseFiles) -> Callable[[], int]:
    """``~`` is the home folder; no folder of that name is created."""

    def call() -> int:
        code = train(files.fixtures / "detector.yaml", "output_dir=~/x")
        made = files.base / "home" / "x"
        there = (made / "report.html").exists()
        if there:
            __import__("shutil").rmtree(made)
        return code if there else DISAGREE

    return call
