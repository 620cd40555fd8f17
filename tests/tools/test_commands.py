"""The console command ``detr-bf``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import detr_bf
from detr_bf.acceleration.threads import OPENMP_SETTINGS, _busy_and_all_ticks, spin_less_beside_others
from detr_bf.analysis.classification import ANALYSES
from detr_bf.commands import (
    COMMANDS,
    EXIT_CODES,
    analyze,
    arguments,
    main,
    model_arguments,
    predict,
)
from detr_bf.commands.completion import usage_of
from detr_bf.commands.sample_data import SETS
from detr_bf.config import SCHEMAS, known_keys, packaged_configs, schema_of
from detr_bf.data.formats import READERS
from detr_bf.evaluation import DEFAULT_THRESHOLD
from detr_bf.interop.classes import NUMBERINGS
from detr_bf.report.figures import FIGURE_SUFFIXES
from tests.tools.test_train_net import records

MOST_MODULES = 181  # modules of detr_bf that training a detector imports; the registry imports every detector
TRAIN = """
import sys
from detr_bf.commands import main
code = main(["train", sys.argv[1], "train.max_steps=1"])
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "detr_bf"))
raise SystemExit(code)
"""


def test_training_a_detector_imports_nothing_of_classifiers(tiny: Path) -> None:
    run = subprocess.run([sys.executable, "-c", TRAIN, str(tiny)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    modules = run.stdout.splitlines()[-1].split()
    assert [name for name in modules if name.startswith(("detr_bf.classification", "detr_bf.segmentation"))] == []
    assert "detr_bf.detectors.detr" in modules
    assert len(modules) <= MOST_MODULES, modules


def test_the_package_alone_is_imported_without_torch() -> None:
    code = "import sys, detr_bf, detr_bf.commands, detr_bf.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WRONG = """
import sys
from detr_bf.commands import COMMANDS, main
cases = [[name, option] for name in COMMANDS for option in ("--help", "--no-such-option")]
cases += [line.split() for line in sys.argv[1].splitlines()]
for case in cases:
    try:
        code = main(case)
    except SystemExit as stopped:
        code = stopped.code
    assert code == (0 if case[-1] == "--help" else 2), case
    assert "torch" not in sys.modules, case
"""


def test_help_and_wrong_arguments_need_no_torch(tmp_path: Path) -> None:
    """Importing it takes seconds of the processor."""
    cases = """train nosuch
train demo train.epochs=0
train demo nosuch=1
evaluate nowhere
evaluate . demo train.epochs=0
check nosuch
finetune nowhere
predict nowhere x.jpg --output found
serve nowhere
export nowhere --output x.onnx
benchmark nowhere
convert nowhere x.pt
analyze fgsm nowhere --output found
compare nowhere nowhere2
report nowhere
settings nosuch"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # so that the load of the machine is not measured
    done = subprocess.run(
        [sys.executable, "-c", WRONG, cases], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_of_options_are_those_of_the_modules() -> None:
    """The parsers import no module that imports torch, and repeat some names."""
    assert tuple(predict.OBJECT_FORMATS) == model_arguments._OBJECT_FORMATS
    assert model_arguments._DEFAULT_THRESHOLD == DEFAULT_THRESHOLD
    assert model_arguments._NUMBERINGS == NUMBERINGS
    assert tuple(f".{each}" for each in model_arguments._FIGURE_FORMATS) == FIGURE_SUFFIXES
    named = (analyze.BATCH_ATTENTION, analyze.QUERIES, analyze.PANOPTIC, analyze.MINI_BATCH)
    assert (*named, *ANALYSES, analyze.CORRUPTED) == model_arguments.ANALYSIS_NAMES
    assert analyze.BATCH_SIZE == 64, "the help of --batch-size says so"
    assert tuple(SETS) == arguments.SAMPLE_SETS
    assert tuple(READERS) == arguments._DATA_FORMATS[1:]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The options, settings and recipes of the examples exist."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: detr-bf {command}" in printed
    usage = usage_of(COMMANDS[command].read)
    options = {"--help", *re.findall(r"--[a-z][a-z0-9-]*", usage)}
    examples = [line for line in printed.splitlines() if line.startswith(f"detr-bf {command} ")]
    assert examples
    keys = {key for task in SCHEMAS for key in known_keys(schema_of(task))}
    for example in examples:
        words = shlex.split(example, comments=True)[2:]
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, example
        settings = {word.partition("=")[0].strip("[") for word in words if re.match(r"[a-z_.]+=", word)}
        assert settings <= keys, example
        if command in ("train", "evaluate", "check", "plan"):
            names = {word for word in words if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+|finetune", word)}
            assert names <= set(packaged_configs()), example


def test_exit_codes_are_in_the_help_and_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "\n".join(EXIT_CODES) in printed
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    assert "\n".join(EXIT_CODES[1:]) in page, "the table of the docs is that of the help"
    assert all(f"| `{name}` |" in page for name in COMMANDS)


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trian"])
    assert stopped.value.code == 2
    assert "train" in capsys.readouterr().err


def test_train_then_evaluate(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configs and settings may come in any order; several files are merged."""
    second = tmp_path / "second.yaml"
    second.write_text("train: {max_steps: 2}\n")
    assert main(["train", "train.log_every=1", str(tiny), str(second)]) == 0
    assert [record["step"] for record in records(tmp_path / "run" / "metrics.jsonl", "train")][-1] == 2
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "eval.pictures=0"]) == 0
    assert "AP " in capsys.readouterr().out


def test_a_packaged_config_is_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "detr_r50_bfv2"]) == 2  # its COCO files do not exist
    assert "data/coco" in capsys.readouterr().err
    assert main(["train", "detr_r50_bvf2"]) == 2
    assert "detr_r50_bfv2" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "give a config" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"detr-bf {detr_bf.__version__}\n"


def test_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{key}=" in printed for key in known_keys())
    assert main(["settings", "train.batch_size"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("train.batch_size=2  (int; greater than 0")
    assert len(printed.splitlines()) == 2
    assert main(["settings", "--task", "classification", "plugins"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines
    assert all(line.startswith("plugins.") for line in lines)
    assert main(["settings", "train.batchsize"]) == 2
    assert "nearest: train.batch_size" in capsys.readouterr().err


def test_every_recipe_has_a_line_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(packaged_configs())
    assert all(len(line) <= 121 and len(line.split()) > 3 for line in lines)
    assert main(["recipes", "demo", "--files"]) == 0
    assert capsys.readouterr().out.split() == ["demo", str(packaged_configs()["demo"])]


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "detr_r50*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [name for name in packaged_configs() if name.startswith("detr_r50")]


def test_a_file_may_have_an_equals_sign_and_a_folder_the_name_of_a_config(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.rename(tmp_path / "lr=1.yaml")
    assert main(["check", "--config", "lr=1.yaml"]) == 0
    (tmp_path / "detr_r50").mkdir()
    assert main(["check", "detr_r50"]) == 2
    assert "data/coco" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat")
@pytest.mark.parametrize("settings", [{}, {"OMP_WAIT_POLICY": "active"}])
@pytest.mark.parametrize("others", [0.0, 0.2, 0.3, 1.0])
def test_openmp_spins_less_only_beside_other_programs(
    others: float, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = iter([(100, 1000), (100 + round(others * 40), 1040)])
    monkeypatch.setattr("detr_bf.acceleration.threads._busy_and_all_ticks", lambda: next(reads))
    monkeypatch.delitem(sys.modules, "torch")
    kept = {name: value for name, value in os.environ.items() if name not in OPENMP_SETTINGS}
    monkeypatch.setattr(os, "environ", kept | settings)
    spin_less_beside_others(seconds=0)
    expected = others >= 0.25 and not settings
    assert os.environ.get("GOMP_SPINCOUNT") == ("1000" if expected else None)
    assert ("other programs use" in capsys.readouterr().err) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat")
def test_a_program_that_computes_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            before = _busy_and_all_ticks()
            time.sleep(1)
            busy, ticks = (after - start for after, start in zip(_busy_and_all_ticks(), before, strict=True))
        finally:
            other.kill()
    assert ticks >= busy >= 50  # of the 100 ticks of one core in a second
