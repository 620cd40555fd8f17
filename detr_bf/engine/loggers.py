"""Loggers: other programs that get the numbers and pictures of a run, whose plain files stay the record of it.

A resumed run continues the run of Weights & Biases or MLflow that ``loggers.json`` names, and logs no step twice.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

from detr_bf.common.errors import InputError, Interrupted
from detr_bf.common.files import read_json, read_records, write_json
from detr_bf.data.images import read_image
from detr_bf.engine.run_folder import RunFolder

logger = logging.getLogger(__name__)

_MODULES = {  # by name in train.loggers and of the extra in pyproject.toml
    "tensorboard": ("torch.utils.tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
_PROJECT = "detr_bf"  # project of W&B and experiment of MLflow, unless their own settings name one
_PARAMS = 100  # of MLflow: most settings in one call


class Logger(Protocol):
    """Gets the numbers and pictures of a run; only the main rank has loggers.

    A logger that is a context manager is entered before training and left at its end, with the exception that ended
    the run, if any. An exception that a method raises ends the use of the logger, not the run.
    """

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a record of ``metrics.jsonl``.

        Args:
            kind: ``train`` or ``val``.
            step: optimizer steps done.
            values: by name; they may be NaN or infinite, which ``metrics.jsonl`` has as null.
        """

    def log_picture(self, name: str, step: int, path: Path) -> None:
        """Log a PNG or JPEG file of the run after ``step`` optimizer steps."""


class LoggerState:
    """Entry of one logger in ``loggers.json``.

    Args:
        entry: ``id`` and ``store`` of the run in the other program, and the last step that it has of each kind of
            record and of each picture. Empty for a new run; it is updated in place.
    """

    def __init__(self, entry: dict[str, Any], save: Callable[[], None]) -> None:
        self._entry, self._save = entry, save

    def run_in(self, store: str) -> str | None:
        """Return the id of the run to continue, None if there is none in this store."""
        return self._entry["id"] if self._entry.get("store") == store else None

    def begin(self, run_id: str, store: str) -> None:
        """Record the id and the store of the run that is logged to."""
        if self.run_in(store) != run_id:
            self._entry.clear()
        self._entry.update(id=run_id, store=store)
        self._save()

    def has(self, what: str, step: int) -> bool:
        """Return True if an earlier process has logged this or a later step of ``what``."""
        return step <= self._entry.get(what, -1)

    def add_picture(self, name: str, step: int) -> None:
        """Record that a picture was logged."""
        self._entry[f"pictures/{name}"] = step
        self._save()


class TensorBoardLogger:
    """Event files of TensorBoard.

    Args:
        purge_step: TensorBoard ignores what earlier files hold from this step on; None: it ignores nothing.
    """

    def __init__(self, folder: Path, purge_step: int | None, state: LoggerState) -> None:
        self._folder, self._purge_step, self._state = folder, purge_step, state

    def __enter__(self) -> TensorBoardLogger:
        with _starting("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def log_picture(self, name: str, step: int, path: Path) -> None:
        if self._state.has(f"pictures/{name}", step):
            return
        self._writer.add_image(f"pictures/{name}", read_image(path), step)
        self._state.add_picture(name, step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.close()


class _ServiceLogger:
    """Base class of loggers with a run in another program; arguments as of :func:`make_loggers`.

    Args:
        config: settings of the run by full key, such as ``train.epochs``.
    """

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], state: LoggerState) -> None:
        self._folder, self._config, self._state = folder, config, state


class WandbLogger(_ServiceLogger):
    """A run of Weights & Biases, with its files in ``wandb`` in the run folder.

    Its environment variables and settings files apply, such as ``WANDB_MODE`` and ``WANDB_PROJECT``. Without an API key
    the run is offline, with a warning; wandb never asks for one.
    """

    def __enter__(self) -> WandbLogger:
        with _starting("wandb"):
            import wandb

            settings = wandb.setup().settings
            known, mode = self._state.run_in(settings.base_url), cast("Any", settings.mode)
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                mode = "offline"
                logger.warning(
                    "wandb has no API key (WANDB_API_KEY, or wandb login): this run is logged offline. To upload it "
                    "later: cd '%s' && wandb sync",
                    self._folder.path,
                )
            self._run = wandb.init(
                dir=str(self._folder.path),
                project=settings.project or _PROJECT,
                name=settings.run_name or self._folder.path.resolve().name,
                config=dict(self._config),
                id=known,
                resume="allow" if known else None,
                mode=mode,
                reinit="create_new",  # leaves a run of the calling program alone
                allow_val_change=True,  # a resumed run may have other settings
            )
            for kind in ("train", "val", "pictures"):
                self._run.define_metric(f"{kind}/*", step_metric="step")
            self._state.begin(self._run.id, settings.base_url)
        return self

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if not self._state.has(kind, step):
            self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"step": step})

    def log_picture(self, name: str, step: int, path: Path) -> None:
        import wandb

        if not self._state.has(f"pictures/{name}", step):
            self._run.log({f"pictures/{name}": wandb.Image(str(path)), "step": step})
            self._state.add_picture(name, step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class MlflowLogger(_ServiceLogger):
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names or else in a SQLite file in the run folder."""

    def __enter__(self) -> MlflowLogger:
        with _starting("mlflow"):
            import mlflow

            is_own = not mlflow.is_tracking_uri_set()
            uri = self._own_store() if is_own else mlflow.get_tracking_uri()
            store = re.sub(r"//[^/@]*@", "//", uri)  # loggers.json must not hold a password
            self._client, known = mlflow.MlflowClient(tracking_uri=uri), self._state.run_in(store)
            if known is None:
                name = self._folder.path.resolve().name
                self._run_id = self._client.create_run(self._experiment(is_own), run_name=name).info.run_id
                self._log_config()
            else:  # the settings of a run cannot be changed
                self._run_id = known
                self._client.update_run(known, status="RUNNING")
            self._state.begin(self._run_id, store)
        return self

    def _own_store(self) -> str:
        from sqlalchemy import make_url

        self._folder.mlflow.mkdir(exist_ok=True)
        path = self._folder.mlflow.resolve() / "mlflow.db"
        if make_url(uri := f"sqlite:///{path}").database != str(path):
            raise InputError(
                f"train.loggers: the store of mlflow cannot be in {path.parent}, whose name has characters with a "
                "meaning in a URL: choose another output_dir, or set MLFLOW_TRACKING_URI"
            )
        return uri

    def _experiment(self, is_own: bool) -> str:
        """Return the id of the experiment; in the store of a run folder it is named after the folder."""
        if not is_own and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name, artifacts = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT, None
        if is_own:
            name, artifacts = str(self._folder.path.resolve()), (self._folder.mlflow.resolve() / "artifacts").as_uri()
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts)

    def _log_config(self) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_key(key), str(value)) for key, value in self._config.items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS])

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if not self._state.has(kind, step):
            now = int(time.time() * 1000)
            metrics = [Metric(_mlflow_key(f"{kind}/{name}"), value, now, step) for name, value in values.items()]
            self._client.log_batch(self._run_id, metrics=metrics)

    def log_picture(self, name: str, step: int, path: Path) -> None:
        """Log the picture as an artifact, which replaces that of an earlier step."""
        self._client.log_artifact(self._run_id, str(path), "pictures")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else "KILLED" if stopped else "FAILED")


def _mlflow_key(name: str) -> str:
    return re.sub(r"[^\w./: -]", "_", name)


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """Raise any error of the block as an InputError, also if a library that the logger needs is missing."""
    try:
        for module in _MODULES[name]:
            if import_module(module).__file__ is None:  # a folder of that name in the current directory
                raise ImportError(f"{module} is only a folder")
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"train.loggers: {name} needs libraries that are missing ({error}): pip install 'detr_bf[{name}]', or "
            f"leave {name} out"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"train.loggers: {name} cannot be started ({reason}): correct its settings or its "
            f"version (pip install --upgrade 'detr_bf[{name}]'), or leave it out"
        ) from error


def check_loggers(names: Sequence[str]) -> None:
    """Import the libraries of loggers (InputError: one is missing; the message names the extra to install)."""
    for name in names:
        with _starting(name):
            pass


def make_loggers(
    names: Sequence[str], folder: RunFolder, config: Mapping[str, Any], resume_from: Mapping[str, int] | None = None
) -> list[Logger]:
    """Return loggers by their names in ``train.loggers``; they start when they are entered.

    Call it before ``metrics.jsonl`` is shortened: what a resumed run has logged is read from it.

    Args:
        config: settings of the run by full key, such as ``train.epochs``.
        resume_from: last step of each kind of record that a resumed run keeps.
    """
    entries = _logged_before(folder) if resume_from and names else {}
    found: list[Logger] = []
    for name in names:
        state = LoggerState(entries.setdefault(name, {}), lambda: write_json(folder.loggers, entries))
        if name == "tensorboard":
            purge_step = resume_from["train"] + 1 if resume_from else None
            found.append(TensorBoardLogger(folder.tensorboard, purge_step, state))
        elif name == "wandb":
            found.append(WandbLogger(folder, config, state))
        else:
            found.append(MlflowLogger(folder, config, state))
    return found


def _logged_before(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the entries of ``loggers.json``, with the last steps in ``metrics.jsonl`` as logged.

    They are stored, because the resumed run drops the records after its checkpoint, which the loggers keep.
    """
    try:
        entries = read_json(folder.loggers)
        if not _are_entries(entries):
            raise ValueError("it holds something else")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("%s is damaged (%s): wandb and mlflow start new runs", folder.loggers, error)
        return {}
    for record in (record for _, record in read_records(folder.metrics) if record is not None):
        for entry in entries.values():
            entry[record["kind"]] = max(record["step"], entry.get(record["kind"], -1))
    write_json(folder.loggers, entries)
    return entries


def _are_entries(value: Any) -> bool:
    """Return True for a dictionary of entries, see :class:`LoggerState`."""
    return isinstance(value, dict) and all(
        isinstance(entry, dict)
        and ("id" in entry) == ("store" in entry)
        and all(isinstance(each, str if key in ("id", "store") else int) for key, each in entry.items())
        for entry in value.values()
    )
