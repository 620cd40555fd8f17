"""Fields with checked values, and the settings shared by the configs of all tasks. Imports no torch.

Every number has an upper limit: a value too large by a typing error would hang the run or fill the memory without a
message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detr_bf.common.errors import InputError


@dataclass(frozen=True)
class Rule:
    """Allowed values of a setting, as text and as a predicate."""

    wanted: str
    holds: Callable[[Any], bool]

    def allows(self, value: Any) -> bool:
        """Return True if the rule holds, or if the value is None."""
        try:
            return value is None or self.holds(value)
        except TypeError:  # for example a list inside a list
            return False

    @property
    def field(self) -> dict[str, Any]:
        return {"metadata": {"rule": self}}


LARGE = 1e6  # maximum of weights, costs and factors
RATE = 1e30  # maximum learning rate: a run with too large a one stops by itself at its first steps
STEPS = 10**9  # maximum number of steps, images or pixels
LAYERS = 100  # maximum number of layers of one kind
WIDTH = 16_384  # maximum number of channels, and of pixels along one side of an image


def _written(number: float) -> str:
    return f"{number:g}" if number < 1e6 else f"{number:.0e}".replace("e+0", "e").replace("e+", "e")


def positive_rule(most: float = LARGE) -> Rule:
    return Rule(f"greater than 0 and at most {_written(most)}", lambda value: 0 < value <= most)


def not_negative_rule(most: float = LARGE) -> Rule:
    return Rule(f"0 or more and at most {_written(most)}", lambda value: 0 <= value <= most)


AUTO = "auto"  # number that is chosen for the optimizer steps of a run


def or_auto(rule: Rule) -> Rule:
    return Rule(f"{rule.wanted}, or {AUTO}", lambda value: value == AUTO or rule.holds(value))


def resolved_number(value: float | str) -> float:
    """Return the value of a setting in which numbers have replaced ``auto``."""
    assert not isinstance(value, str), "resolved"
    return value


FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Rule("between 0 and 1, and less than 1", lambda value: 0 <= value < 1)
SEED = Rule("at least 0 and less than 2**63", lambda value: 0 <= value < 2**63)
SIZES = Rule(
    f"one or more sizes greater than 0 and at most {WIDTH}",
    lambda sizes: bool(sizes) and all(1 <= size <= WIDTH for size in sizes),
)
MULTIPLES_OF_32 = Rule(
    f"multiples of 32 from 32 to {WIDTH}",
    lambda sides: len(sides) <= 1000 and all(0 < side <= WIDTH and side % 32 == 0 for side in sides),
)
INDICES = Rule(
    f"integers from 0 to {_written(STEPS)}",
    lambda values: len(values) <= 10**6 and all(0 <= x <= STEPS for x in values),
)
NUMBERS = Rule(
    f"finite numbers of at most {_written(LARGE)}", lambda values: all(abs(value) <= LARGE for value in values)
)
LOCAL_PATH = Rule(
    "a path on this machine with names of at most 255 bytes (URLs are not supported: download it first, and give the "
    "path of the file)",
    lambda value: _is_local_path(value),
)
LOCAL_PATHS = Rule(
    "a list of at most 100 Python files on this machine, each with another name",
    lambda values: len(values) <= 100 and all(map(_is_local_path, values)) and _have_names_of_their_own(values),
)
WEIGHTS = Rule(
    f"{LOCAL_PATH.wanted}, the name of published weights, or hf://user/name",
    lambda value: bool(re.fullmatch(r"hf://[\w.-]+/[\w.-]+(@[\w./-]+)?", value)) or _is_local_path(value),
)
ARGUMENTS = Rule(
    f"plain values with finite numbers of at most {_written(LARGE)}, depths of at most {LAYERS}, and no more than four "
    "levels",
    lambda values: _plain_arguments(values),
)


def _is_local_path(value: str) -> bool:
    longest = max(len(name.encode(errors="surrogatepass")) for name in value.split("/"))
    return longest <= 255 and len(value) <= 4000 and "\0" not in value and not re.match(r"[A-Za-z][\w+.-]*://", value)


def _have_names_of_their_own(paths: list[str]) -> bool:
    names = [each.partition("@")[0].rpartition("/")[2] for each in paths]
    return len(set(names)) == len(names)


def _plain_arguments(value: Any, key: str = "", level: int = 0) -> bool:
    if isinstance(value, dict):
        return level < 4 and all(_plain_arguments(each, str(name), level + 1) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return level < 4 and len(value) <= 1000 and all(_plain_arguments(each, key, level + 1) for each in value)
    if isinstance(value, (int, float)):
        return abs(value) <= (LAYERS if "depth" in key else LARGE)
    return True


def choice(default: str, *others: str) -> Any:
    """Return a field for one of a fixed set of words; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def positive(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **positive_rule(most).field)


def not_negative(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **not_negative_rule(most).field)


def bits(default: int | None) -> Any:
    return field(default=default, **Rule("from 8 to 16", lambda value: 8 <= value <= 16).field)


def depth(default: int) -> Any:
    """Return a field for the bits of a channel."""
    return field(default=default, **Rule("8 or 16", lambda value: value in (8, 16)).field)


def automatic(default: float, rule: Rule) -> Any:
    """Return a field for a number or ``auto``."""
    return field(default=default, **or_auto(rule).field)


def fraction(default: float | None) -> Any:
    return field(default=default, **FRACTION.field)


def below_one(default: float | None) -> Any:
    """Return a field for a fraction below 1, such as a dropout rate."""
    return field(default=default, **BELOW_ONE.field)


def seed(default: int | None) -> Any:
    return field(default=default, **SEED.field)


def sizes(*default: int) -> Any:
    return field(default_factory=lambda: list(default), **SIZES.field)


def sides() -> Any:
    """Return a field for a list of sides of batches in pixels, by default empty."""
    return field(default_factory=list, **MULTIPLES_OF_32.field)


def indices(*default: int) -> Any:
    """Return a field for a list of layers, epochs or classes, counted from 0."""
    return field(default_factory=lambda: list(default), **INDICES.field)


def numbers(*default: float) -> Any:
    """Return a field for a list of finite numbers; its dataclass checks their number and range."""
    return field(default_factory=lambda: list(default), **NUMBERS.field)


def names_of(*choices: str) -> Any:
    """Return a field for a list of different words of a fixed set, by default empty."""
    rule = Rule(
        f"a list of names, each at most once, of {', '.join(choices)}",
        lambda names: len(set(names)) == len(names) and set(names) <= set(choices),
    )
    return field(default_factory=list, **rule.field)


def arguments() -> Any:
    """Return a field for keyword arguments of a function of another library."""
    return field(default_factory=dict, **ARGUMENTS.field)


def factors() -> Any:
    """Return a field for factors by name, by default empty."""
    rule = Rule(
        f"names with factors from 0 to {_written(LARGE)}",
        lambda by_name: all(0 <= factor <= LARGE for factor in by_name.values()),
    )
    return field(default_factory=dict, **rule.field)


def python_files() -> Any:
    """Return a field for a list of Python files; the loader replaces those that the user names by name and hash."""
    return field(default_factory=list, metadata={"rule": LOCAL_PATHS, "code": True})


def path(default: str | None) -> Any:
    """Return a field for a file or folder; the loader replaces a leading ``~`` by the home folder."""
    return field(default=default, metadata={"rule": LOCAL_PATH, "path": True})


def weights(default: str | None) -> Any:
    """Return a field for a file or folder of weights, the name of published ones, or an address on the Hub."""
    return field(default=default, metadata={"rule": WEIGHTS, "path": True})


@dataclass
class OptimizerConfig:
    """Learning rate, its schedule, weight decay and gradient clipping."""

    lr: float | int | str = automatic(1e-4, not_negative_rule(RATE))  # learning rate; auto: RT-DETR, D-FINE
    weight_decay: float = not_negative(1e-4)  # times the learning rate: share of a weight that each step subtracts
    schedule: str = choice("step", "cosine", "flat_cosine")  # of the learning rate
    drop_epochs: list[int] | None = indices(200)  # lr times drop_factor after these; null: at 80 %; only schedule=step
    drop_factor: float = positive(0.1, 1)  # factor at each of drop_epochs
    flat_epochs: int = not_negative(0)  # epochs at the full rate, then half a cosine; only schedule=flat_cosine
    final_epochs: int = not_negative(0)  # epochs at the end with lr times final_factor; only schedule=flat_cosine
    final_factor: float = fraction(0.5)  # factor at the end; only schedule=flat_cosine
    warmup_steps: int | str = automatic(0, not_negative_rule(STEPS))  # of rising lr; auto: 10 % of steps, at most 100
    warmup_power: int = positive(1, 10)  # exponent of the rise: 1 is linear; 2 in DEIM
    clip_norm: float = not_negative(0.1)  # maximum gradient norm; 0: no clipping


def check_betas(prefix: str, betas: list[float]) -> None:
    """Raise InputError unless ``betas`` are those of AdamW."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"{prefix}betas must be two numbers from 0 to less than 1, got {betas}")


@dataclass
class EmaConfig:
    """Exponential moving average of the weights; the better ones of these and the raw weights are used."""

    enabled: bool = False  # average the weights, and evaluate both raw and averaged ones
    decay: float | int | str = automatic(0.9997, BELOW_ONE)  # share of the average that a step keeps; auto: by steps
    warmup_steps: int = not_negative(0, STEPS)  # W > 0: step n keeps decay * (1 - exp(-n / W)); 0: always decay


@dataclass
class TrainConfig:
    """Length, batch size and precision of training."""

    epochs: int = positive(300)  # passes over the training data
    max_steps: int | None = positive(None, STEPS)  # end early, at this optimizer step; null: train all epochs
    batch_size: int = positive(2)  # images per batch of one process
    accumulate: int = positive(1)  # batches per optimizer step of one process
    precision: str = choice("float32", "bf16", "fp16", "auto")  # auto: float32 on a CPU, bf16 or else fp16 on a GPU
    float32_matmul: str = choice("high", "highest")  # float32 products on a GPU: high is TF32, highest full float32
    compile: bool = False  # torch.compile; of a detector: its backbone and each encoder and decoder layer
    channels_last: bool = False  # memory format of convolutions
    max_skipped: int = not_negative(0, STEPS)  # steps with a non-finite loss or gradient to skip before stopping
    timeout_minutes: float = positive(30.0)  # maximum time that a process waits for the others
    log_every: int = positive(20, STEPS)  # steps between two lines of the log
    eval_every: int = positive(1)  # epochs between two evaluations
    patience: int | None = positive(None)  # end after this many epochs without a better score; null: train all epochs
    loggers: list[str] = names_of("tensorboard", "wandb", "mlflow")  # they also get the numbers and pictures of a run
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class CheckpointConfig:
    """Additional checkpoints; the end of each epoch always writes one."""

    every_steps: int = positive(1000, STEPS)  # optimizer steps between two checkpoints
    every_minutes: float | None = positive(30.0)  # minutes between two checkpoints; null: no limit
    keep_every: int = not_negative(0)  # keep the checkpoint of every n-th epoch; 0: only last, previous and best


@dataclass
class LoadingConfig:
    """Data loading and data checks of all tasks."""

    workers: int = not_negative(2, 512)  # loader processes of each training process; 0: load in the training process
    check: bool = True  # check the data before the first step
    max_pixels: int = positive(178_956_970, STEPS)  # pixels of an image file; larger files are refused undecoded
    grey_bits: int | None = bits(None)  # of 16-bit grey images, scaled to 8; null: those that the training images use
    max_unreadable: float = fraction(0.01)  # share of an epoch's images that may be unreadable and replaced by others


@dataclass
class RunConfig:
    """Settings of a run of any task."""

    task: str = ""  # what is trained; each schema has its own
    output_dir: str = path("runs/default")  # default: runs/NAME, with NAME of the last config file without its suffix
    init_from: str | None = weights(None)  # checkpoint, published weights or hf://user/name to start from; null: none
    seed: int = seed(42)  # of weights, data order, augmentation and dropout
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    report: bool = True  # write report.html at the end of a training or an evaluation; false removes an older one
    data: LoadingConfig = field(default_factory=LoadingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        self.sources: dict[str, str] = {}  # by full key: the file or override that set it; not a setting

    @staticmethod
    def superseded(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return earlier settings that these settings of a file, or of the command line, exclude, with no value."""
        return {}

    def check_values(self, prefix: str) -> None:
        optimizer, epochs = self.optimizer, self.train.epochs
        if optimizer.schedule == "flat_cosine" and optimizer.flat_epochs + optimizer.final_epochs >= epochs:
            raise InputError(
                f"{prefix}optimizer.schedule=flat_cosine: flat_epochs={optimizer.flat_epochs} and final_epochs="
                f"{optimizer.final_epochs} leave no epoch for the cosine in a run of {prefix}train.epochs={epochs}: "
                "give smaller numbers, or more epochs"
            )


@dataclass
class ContextBroadcastingConfig:
    """Context Broadcasting (Hyeon-Woo et al. 2023, arXiv 2210.08457): add the mean token to all tokens of a block."""

    enabled: bool = False  # use this plug-in
    layers: Any = "upper"  # upper (second half: our choice), all, or a list of blocks or encoder layers from 0
    position: str = choice(
        "end", "mid", "front", "attention", "both"
    )  # end, mid or front of the feed-forward network; after attention; both: attention and end
    scaled: bool = False  # multiply the mean by learned scales (CB_S in the paper); only position=end
    skip: list[int] = indices()  # excluded blocks, such as those whose output a feature pyramid reads (Sec. 4.4)


@dataclass
class LocalizationConfig:
    """Dense relative localization (Liu et al. 2021, arXiv 2106.03746): predict the distance of pairs of tokens."""

    enabled: bool = False  # use this plug-in
    weight: float | None = not_negative(None)  # lambda; null: 0.01 for a ViT (paper), 0.5 for Swin (authors' train.sh)
    variant: str = choice("abs", "signed", "ce", "reg", "all")  # see docs/recipes.md; all: abs at every block
    hidden: int = positive(512, WIDTH)  # width of both hidden layers of the predictor
    num_pairs: int = positive(64, 10**6)  # pairs of tokens per image
    normalize: bool = True  # distances as a share of the grid; false: in cells, as in yhlleo/VTs-Drloc
