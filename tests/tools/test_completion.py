"""The completion script in bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from detr_bf.commands import COMMANDS, main
from detr_bf.config import DetectionConfig, known_keys, packaged_configs

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell") / "detr-bf"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    code = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _detr_bf; printf "%s\\n" "${COMPREPLY[@]}"; '
        "complete -p detr-bf >&2"
    )
    command = ["bash", "--norc", "-c", code, "bash", str(script), "detr-bf", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stderr == "complete -o default -F _detr_bf detr-bf\n"
    return done.stdout.split()


def test_commands(script: Path) -> None:
    assert completed(script, "") == list(COMMANDS)
    assert completed(script, "conv") == ["convert", "convert-data"]


def test_options_recipes_and_settings(script: Path) -> None:
    assert completed(script, "train", "--dry") == ["--dry-run"]
    assert set(completed(script, "train", "--")) >= {"--resume", "--auto-resume", "--config", "--help"}
    assert completed(script, "train", "") == ["--help", *completed(script, "train", "--")[1:], *packaged_configs()]
    assert completed(script, "check", "rtdetr_r") == [
        name for name in packaged_configs() if name.startswith("rtdetr_r")
    ]
    assert completed(script, "train", "demo", "optimizer.warmup_s") == ["optimizer.warmup_steps="]
    offered = set(completed(script, "train", "data."))
    assert offered >= {f"{key}=" for key in known_keys(DetectionConfig) if key.startswith("data.")}
    assert "data.repeated_augment=" in offered or len(offered) > 30, "settings of all tasks"
    assert completed(script, "predict", "--pan") == ["--panoptic"]
    assert completed(script, "predict", "data.") == [], "files, by the default of the shell"
    assert completed(script, "train", "data.train.images", "=", "d") == [], "files after the equals sign"
    assert completed(script, "nonsense", "--") == []


def test_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert "bashcompinit" in printed
    assert "complete -o default -o nospace -F _detr_bf detr-bf" in printed
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "fish"])
    assert stopped.value.code == 2
