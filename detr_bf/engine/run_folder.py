"""Where the files of a run lie."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from detr_bf.errors import InputError
from detr_bf.files import is_folder


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a run and the names in it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def machine(self) -> Path:
        return self.path / "machine.json"

    @property
    def last(self) -> Path:
        return self.path / "last.pt"

    @property
    def best(self) -> Path:
        return self.path / "best.pt"

    @property
    def previous(self) -> Path:
        """What was in ``last`` before: used where that is damaged."""
        return self.path / "previous.pt"

    @property
    def damaged(self) -> Path:
        """Where a ``last`` that cannot be read is put."""
        return self.path / "last.damaged.pt"

    @property
    def launch(self) -> Path:
        """By whose start the run stands where it does."""
        return self.path / "launch.txt"

    def capture(self, step: int, process: int) -> Path:
        return self.path / "captures" / f"step_{step:07d}_process_{process}.pt"

    def epoch(self, number: int) -> Path:
        return self.path / f"epoch_{number:04d}.pt"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def sheet(self) -> Path:
        return self.path / "pictures" / "validation.png"

    @property
    def panoptic(self) -> Path:
        """Folder of the PNG files that ``panoptic_results`` lists."""
        return self.path / "panoptic"

    @property
    def panoptic_results(self) -> Path:
        return self.path / "panoptic.json"

    @property
    def panoptic_sheet(self) -> Path:
        return self.path / "pictures" / "panoptic.png"

    @property
    def predictions(self) -> Path:
        """Of a classifier: a line for every validation image."""
        return self.path / "predictions.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def create(self) -> None:
        """Make the folder and prove that files can be written there.

        Raises:
            InputError: they cannot.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InputError(
                f"output_dir {self.path} cannot be written ({error.strerror or error}): "
                "choose another with output_dir=DIR"
            ) from error

    @contextmanager
    def left_as_it_was_on_bad_input(self) -> Iterator[None]:
        """Create the folder; what is written into it within the block is taken back if an InputError ends it."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.create()
        before = set(self.path.iterdir())
        try:
            yield
        except InputError:
            with suppress(OSError):
                for file in set(self.path.iterdir()) - before:
                    file.unlink()
                for folder in missing:
                    folder.rmdir()
            raise

    def holds_a_run(self) -> bool:
        """Whether there is a checkpoint to go on from; killed between two renamings a run leaves ``previous`` alone."""
        return self.last.exists() or self.previous.exists()

    def is_of(self, launch: str) -> bool:
        """Whether that launch has started the run or gone on with it."""
        return self.launch.exists() and self.launch.read_text(encoding="utf-8") == launch

    def check_unused(self) -> None:
        """Refuse a folder that holds another run's checkpoint."""
        if self.holds_a_run():
            raise InputError(
                f"output_dir {self.path} already holds a run: go on with --resume, "
                "or choose another with output_dir=DIR"
            )

    def check_resumable(self) -> None:
        """Refuse to resume where there is nothing."""
        if not self.holds_a_run():
            raise InputError(f"nothing to resume: {self.last} does not exist. Start the run without --resume")


def checkpoint_of(path: str | Path) -> Path:
    """The best checkpoint of a run folder, or its last; a file is itself."""
    folder = RunFolder(Path(path))
    if not is_folder(folder.path):
        return folder.path
    return folder.best if folder.best.exists() else folder.last
