"""Compare each plug-in with its baseline at a size that a CPU can train, with several seeds.

python benchmarks/experiments.py long_tail --output benchmarks/results/long_tail_fashion_cpu.json
python benchmarks/experiments.py small_data --data garment_pairs --jobs 2
python benchmarks/experiments.py small_data --size large          # for a GPU

`long_tail`: cross-entropy, Balanced Softmax, Balanced Softmax with BatchFormer. `small_data`: a ViT without and with
each plug-in, and two controls: `duplicate` is only the doubled batch of BatchFormerV2, `cutmix` only the mixing of
DiversePatch. Each run is a training command with a file of configs/experiments, in its own folder in --runs: finished
runs are not repeated, interrupted ones are resumed. The values are those of the last epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from command import CONFIGS, circumstances
from detr_bf.cli import run_tool
from detr_bf.config import config_to_dict, load_config, saved_config
from detr_bf.engine import RunFolder
from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.report.comparison import compare_variants, comparison_table, save_comparison

TRAIN = Path(__file__).parent.parent / "tools" / "train_net.py"
AS_THEY_STAND = "data.transforms.horizontal_flip=0"  # flips would change the class
GREY_DIGITS = (
    "data.transforms.mean=[0.13,0.13,0.13]",
    "data.transforms.std=[0.31,0.31,0.31]",
    AS_THEY_STAND,
)
FEW_DIGITS = ("data.long_tail.order=[]", "train.batch_size=16", "train.epochs=30", "train.eval_every=30")


@dataclass(frozen=True)
class Experiment:
    """Variants of one file of configs/experiments, the first of which is the baseline."""

    variants: Mapping[str, tuple[str, ...]]  # settings by name
    metrics: tuple[str, ...]  # of ClassificationResult, fractions; the first is drawn
    data: Mapping[str, tuple[str, ...]]  # settings of each data set
    large: tuple[str, ...]  # settings for a GPU


EXPERIMENTS = {
    "long_tail": Experiment(
        {
            "cross_entropy": (),
            "balanced_softmax": ("loss.name=balanced_softmax",),
            "balanced_softmax_batchformer": ("loss.name=balanced_softmax", "plugins.batchformer.enabled=true"),
        },
        ("top1", "many", "medium", "few"),
        {
            "fashion_mnist": (),
            "digits": ("data.name=digits", *FEW_DIGITS, "eval.many=50", "eval.few=10", *GREY_DIGITS),
            "mnist": ("data.name=mnist", *FEW_DIGITS, "eval.many=100", "eval.few=20", *GREY_DIGITS),
        },
        ("model.name=cifar_resnet32", "model.options.width=16", "train.epochs=60", "train.eval_every=60"),
    ),
    "small_data": Experiment(
        {
            "plain": (),
            "batchformer_v2": ("plugins.batchformer_v2={enabled: true, layers: all}",),
            "duplicate": ("plugins.batchformer_v2={enabled: true, layers: all, mode: duplicate}",),
            "context_broadcasting": ("plugins.context_broadcasting.enabled=true",),
            "diverse_patch": ("plugins.diverse_patch.enabled=true",),
            "cutmix": ("data.mix.cutmix=1.0",),
            "relative_localization": ("plugins.relative_localization={enabled: true, weight: 0.01}",),
        },
        ("top1",),
        {
            "fashion_mnist": (),
            "garment_pairs": ("data.name=garment_pairs", "data.per_class=10", AS_THEY_STAND),
            "digits": ("data.name=digits", "data.per_class=null", "data.transforms.size=16", *GREY_DIGITS),
            "mnist": ("data.name=mnist", "data.transforms.size=28", *GREY_DIGITS),
        },
        (
            "model.options={patch_size: 4, embed_dim: 192, depth: 12, num_heads: 3}",
            "data.per_class=null",
            "train.epochs=100",
            "train.eval_every=100",
            "train.batch_size=256",
        ),
    ),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    variant: str
    seed: int
    config: Path
    folder: RunFolder
    overrides: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        return [*self.overrides, f"seed={self.seed}", f"output_dir={self.folder.path}"]

    def finished(self) -> bool:
        """Return True if the folder contains the result of this run.

        Raises:
            InputError: it contains a run with other settings.
        """
        if not self.folder.config.exists():
            return False
        asked = config_to_dict(load_config(self.config, self.settings))
        if config_to_dict(saved_config(self.folder.config)) != asked:
            raise InputError(f"{self.folder.path} contains a run with other settings: give another one, --runs DIR")
        return self.folder.evaluation.exists()

    def train(self, threads: int) -> None:
        """Train in a new process.

        Raises:
            InputError: the process failed; the message contains the end of its output.
        """
        command = [sys.executable, str(TRAIN), "--config", str(self.config), "--auto-resume", *self.settings]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise InputError(f"{' '.join(command)} ended with exit code {ended.returncode}:\n{ended.stderr[-2000:]}")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the finished run."""
        content = json.loads(self.folder.evaluation.read_text(encoding="utf-8"))
        names = ("top1", "many", "medium", "few", "balanced", "ece", "loss")
        return {name: content[name] for name in names if content[name] is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=tuple(EXPERIMENTS))
    parser.add_argument("--data", default="fashion_mnist", help="a data set of the experiment, default %(default)s")
    parser.add_argument("--size", choices=("small", "large"), default="small", help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, default %(default)s")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/experiments"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the first metric here: .svg or .png")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        runs = list(planned(options))
        train_all(runs, options.jobs)
        report(options, runs)
        return 0

    return run_tool(run)


def planned(options: argparse.Namespace) -> Iterator[Run]:
    """Yield every run of the experiment, seed by seed.

    Raises:
        InputError: an unknown data set, or a number below 1.
    """
    experiment = EXPERIMENTS[options.experiment]
    if options.data not in experiment.data:
        raise InputError(f"--data must be one of {', '.join(experiment.data)}; got '{options.data}'")
    if min(options.seeds, options.jobs) < 1:
        raise InputError(f"--seeds and --jobs must be 1 or more, got {options.seeds} and {options.jobs}")
    large = experiment.large if options.size == "large" else ()
    folder = options.runs / f"{options.experiment}_{options.data}_{options.size}"
    for seed in range(options.seeds):
        for variant, settings in experiment.variants.items():
            config = CONFIGS / "experiments" / f"{options.experiment}.yaml"
            overrides = (*settings, *experiment.data[options.data], *large, *options.overrides)
            yield Run(variant, seed, config, RunFolder(folder / variant / f"seed_{seed}"), overrides)


def train_all(runs: Sequence[Run], jobs: int) -> None:
    """Train the unfinished runs, ``jobs`` at a time; these share the threads of the machine."""
    due = [run for run in runs if not run.finished()]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(due), desc="training", unit="run") as bar:
        for _ in pool.map(lambda run: run.train(threads), due):
            bar.update()


def report(options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Print a table for each metric; write the numbers and the picture if requested."""
    experiment = EXPERIMENTS[options.experiment]
    measured = [(run, run.metrics()) for run in runs]
    for metric in (name for name in experiment.metrics if all(name in found for _, found in measured)):
        values = {
            variant: [100 * found[metric] for run, found in measured if run.variant == variant]
            for variant in experiment.variants
        }
        rows = compare_variants(values, next(iter(experiment.variants)))
        print(f"\n{comparison_table(rows, f'{metric} (%)')}")
        if options.picture and metric == experiment.metrics[0]:
            save_comparison(options.picture, rows, f"{metric} (%)")
    if options.output:
        found = [{"variant": run.variant, "seed": run.seed, **metrics} for run, metrics in measured]
        stated = {
            name: str(value) if isinstance(value, Path) else value for name, value in circumstances(options).items()
        }
        write_json(options.output, {**stated, "runs": found})


if __name__ == "__main__":
    sys.exit(main())
