"""Experiment files: the cells that they make, and the files that are refused before anything trains."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest

from detr_bf.common.errors import InputError
from detr_bf.comparison.experiment import ExperimentCell, flat_settings, read_experiment
from detr_bf.config import load_config, packaged_configs, packaged_experiments
from detr_bf.tasks import task_of

BASE = "model: {num_queries: 7}\ntrain: {epochs: 3}\n"
ARMS = "arms:\n  off: [batch_former.enabled=false]\n  two_stream: [batch_former.enabled=true]\n"
VALID = f"base: base.yaml\n{ARMS}seeds: 2\n"
COMMAND = "base: base.yaml\narms:\n  off: []\n  own: {{command: {}}}\nseeds: 2\n"


def write(folder: Path, text: str) -> Path:
    (folder / "base.yaml").write_text(BASE)
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_cells_come_seed_by_seed_with_all_arms(tmp_path: Path) -> None:
    found = read_experiment(write(tmp_path, VALID))
    assert found.cells() == [ExperimentCell(arm, seed, None) for seed in (0, 1) for arm in ("off", "two_stream")]
    assert [cell.name for cell in found.cells()][-1] == "two_stream/seed_1"
    assert (found.baseline, found.primary, found.jobs, found.title) == ("off", "AP", 1, "mine")
    listed = read_experiment(write(tmp_path, VALID.replace("seeds: 2", "seeds: [7, 3]")))
    assert listed.seeds == (7, 3)


def test_contrasts_are_pairs_of_arms_without_the_baseline(tmp_path: Path) -> None:
    text = VALID.replace("seeds: 2", "  on: [batch_former.heads=1]\nseeds: 2") + "baseline: two_stream\n"
    found = read_experiment(write(tmp_path, text + "contrasts: [[on, off]]\n"))
    assert found.contrasts == (("on", "off"),)
    assert read_experiment(write(tmp_path, text)).contrasts == ()
    with pytest.raises(InputError, match="given once"):
        read_experiment(write(tmp_path, text + "contrasts: [[on, off], [off, on]]\n"))


def test_contrasts_only_may_name_the_baseline(tmp_path: Path) -> None:
    text = VALID + "contrasts: [[two_stream, off]]\ncontrasts_only: true\n"
    found = read_experiment(write(tmp_path, text))
    assert (found.contrasts, found.contrasts_only) == ((("two_stream", "off"),), True)
    for wrong in ("contrasts_only: true\n", "contrasts: [[two_stream, off]]\ncontrasts_only: 1\n"):
        with pytest.raises(InputError, match="contrasts_only must be true or false, and needs contrasts"):
            read_experiment(write(tmp_path, VALID + wrong))


def test_a_cell_has_the_settings_of_its_file_arm_and_seed(tmp_path: Path) -> None:
    text = f"base: base.yaml\noverrides: [train.batch_size=5, train.epochs=9]\n{ARMS}seeds: [4]\n"
    path = write(tmp_path, text.replace("[batch_former.enabled=true]", "[batch_former.heads=2, train.epochs=8]"))
    found = read_experiment(path, ["train.log_every=2"])
    config = found.config(ExperimentCell("two_stream", 4, None))
    assert (config.seed, config.batch_former.heads, config.train.batch_size) == (4, 2, 5)
    assert config.train.epochs == 8, "the arm wins over what is common"
    assert config.model.num_queries == 7
    assert found.settings(ExperimentCell("two_stream", 4, None)) == flat_settings(config)
    assert {"seed", "output_dir"}.isdisjoint(flat_settings(config))
    assert read_experiment(path, ["train.epochs=2"]).config(ExperimentCell("off", 4, None)).train.epochs == 2


@pytest.mark.parametrize(
    "settings",
    [
        '[batch_former.heads=2, "batch_former.layers=[0, 1]", optimizer.lr=1e-4, init_from=null]',
        "{batch_former: {heads: 2, layers: [0, 1]}, optimizer.lr: 1e-4, init_from: null}",
        '["batch_former={heads: 2, layers: [0, 1]}", optimizer.lr=0.0001]',
        "\n    batch_former:\n      heads: 2\n      layers: [0, 1]\n    optimizer: {lr: 1.0e-4}",
    ],
)
def test_an_arm_is_a_list_or_a_mapping(tmp_path: Path, settings: str) -> None:
    path = write(
        tmp_path, f"base: base.yaml\narms:\n  off: {{batch_former: {{enabled: off}}}}\n  on: {settings}\nseeds: 1\n"
    )
    found = read_experiment(path)
    expected = load_config(
        tmp_path / "base.yaml", ["batch_former.heads=2", "batch_former.layers=[0,1]", "optimizer.lr=1e-4", "seed=0"]
    )
    assert list(found.arms) == ["off", "on"], "words that YAML reads as booleans are names"
    assert found.config(ExperimentCell("on", 0, None)) == expected
    assert not found.config(ExperimentCell("off", 0, None)).batch_former.enabled


@pytest.mark.parametrize(("baseline", "expected"), [("off", "off"), ("'on'", "on"), ("on", "on")])
def test_the_baseline_may_be_a_word_that_yaml_reads_as_a_boolean(tmp_path: Path, baseline: str, expected: str) -> None:
    text = VALID.replace("two_stream:", "on:") + f"baseline: {baseline}\n"
    assert read_experiment(write(tmp_path, text)).baseline == expected


def test_the_base_is_a_file_beside_it_a_packaged_config_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "second.yaml").write_text("train: {epochs: 4}\n")
    path = write(tmp_path, VALID.replace("base: base.yaml", "base: [demo, base.yaml, second.yaml]"))
    found = read_experiment(path)
    assert found.base == (packaged_configs()["demo"], tmp_path / "base.yaml", tmp_path / "second.yaml")
    config = found.config(ExperimentCell("off", 1, None))
    assert (config.model.name, config.model.num_queries, config.train.epochs) == ("rtdetr", 7, 4)


def test_a_quick_experiment_has_every_arm_once(tmp_path: Path) -> None:
    found = read_experiment(write(tmp_path, VALID + "resamples: 700\n"), quick=True)
    assert found.cells() == [ExperimentCell("off", 0, None), ExperimentCell("two_stream", 0, None)]
    assert found.resamples == 50
    assert all(config.train.max_steps == 4 for config in found.configs.values())


REFUSED = {
    "unknown key": (VALID + "seed: 3\n", "unknown key 'seed'. Did you mean 'seeds'?"),
    "no base": (VALID.replace("base: base.yaml", "title: x"), "base must be given"),
    "missing base": (VALID.replace("base.yaml", "bass.yaml"), "base 'bass.yaml' is neither a file"),
    "not a mapping": ("- 1\n", "must contain 'key: value' lines"),
    "empty": ("", "base and arms and seeds must be given"),
    "broken": ("base: [", "is not valid YAML"),
    "repeated key": (VALID + "jobs: 2\njobs: 3\n", "the key 'jobs' is given twice"),
    "repeated arm": (VALID.replace("two_stream:", "off:"), "the key 'off' is given twice"),
    "one arm": ("base: base.yaml\narms: {off: []}\nseeds: 1\n", "arms must map two or more names"),
    "list of arms": ("base: base.yaml\narms: [off, on]\nseeds: 1\n", "arms must map two or more names"),
    "arm name": (VALID.replace("two_stream:", "two stream:"), "the name 'two stream' must begin"),
    "arm outside": (VALID.replace("two_stream:", "../x:"), "the name '../x' must begin"),
    "hidden arm": (VALID.replace("two_stream:", ".x:"), "the name '.x' must begin"),
    "unknown setting": (VALID.replace("enabled=true", "enabeld=true"), "arms.two_stream: override"),
    "wrong value": (VALID.replace("enabled=true", "heads=0"), "arms.two_stream: batch_former.heads must be"),
    "no assignment": (VALID.replace("batch_former.enabled=true", "two"), "arms.two_stream: override 'two' is not"),
    "control character": (VALID + 'overrides: ["model.name=\\x1b[31m"]\n', "has control characters"),
    "nested list": (
        VALID.replace("[batch_former.enabled=true]", "[[a]]"),
        "arms.two_stream must be a list of key=value",
    ),
    "equal arms": (VALID.replace("enabled=true", "enabled=False"), "arms.two_stream has the same settings as arms.off"),
    "default arm": (
        VALID.replace("[batch_former.enabled=false]", "").replace("=true]", "=false, train.epochs=3]"),
        "arms.two_stream has the same settings as arms.off",
    ),
    "seed in an arm": (VALID.replace("enabled=true", "enabled=true, seed=1"), "arms.two_stream sets seed"),
    "folder in an arm": (
        VALID.replace("enabled=true", "enabled=true, output_dir=x"),
        "arms.two_stream sets output_dir",
    ),
    "fold in an arm": (VALID.replace("enabled=true", "enabled=true, data.fold=1"), "arms.two_stream sets data.fold"),
    "hidden fold": (VALID.replace("batch_former.enabled=true", "'data={folds: 3}'"), "arms.two_stream sets data.folds"),
    "seed for all": (VALID + "overrides: [seed=1]\n", "overrides sets seed"),
    "fold for all": (VALID + "overrides: [data.fold=1]\nfolds: 2\n", "overrides sets data.fold"),
    "other task": (VALID.replace("batch_former.enabled=true", "task=classification"), "arms.two_stream: "),
    "repeated seed": (VALID.replace("seeds: 2", "seeds: [1, 2, 1]"), "seeds: 1 is given twice"),
    "no seeds": (VALID.replace("seeds: 2", "seeds: []"), "seeds must be a number"),
    "negative seed": (VALID.replace("seeds: 2", "seeds: [-1]"), "seeds must be a number"),
    "boolean seeds": (VALID.replace("seeds: 2", "seeds: true"), "seeds must be a number"),
    "no jobs": (VALID + "jobs: 0\n", "jobs must be an integer from 1"),
    "one fold": (VALID + "folds: 1\n", "folds must be an integer from 2"),
    "resamples": (VALID + "resamples: many\n", "resamples must be an integer"),
    "baseline": (VALID + "baseline: on\n", "baseline must be one of the arms off, two_stream"),
    "contrast": (VALID + "contrasts: [[two_stream, three]]\n", "contrasts must be one of the arms off, two_stream"),
    "contrast with the baseline": (VALID + "contrasts: [[two_stream, off]]\n", "none of them the baseline"),
    "contrast of one arm": (VALID + "contrasts: [[two_stream, two_stream]]\n", "must be two different arms"),
    "contrasts": (VALID + "contrasts: two_stream\n", "contrasts must be a list of pairs of arms"),
    "primary": (VALID + "primary: top1\n", "primary must be one of AP, AP50"),
    "title": (VALID + "title: 3\n", "title must be text"),
    "command of numbers": (COMMAND.format("[1]"), "arms.own.command must be one command line"),
    "empty command": (COMMAND.format("''"), "arms.own.command must be one command line"),
    "open quote": (COMMAND.format('"x \'{output}"'), "arms.own.command: No closing quotation"),
    "escape": (COMMAND.format('"x {output} \\e[2J"'), "arms.own.command must be one command line"),
    "unknown variable": (COMMAND.format('"x {output} {sead}"'), "unknown variable sead; known: python, train_images"),
    "no output": (COMMAND.format("x"), "arms.own.command must use {output}"),
    "no seconds": (COMMAND.format('"x {output} {minutes}"'), "arms.own.seconds must be a number from 1"),
    "seconds": (COMMAND.format('"x {output}", seconds: many'), "arms.own.seconds must be a number from 1"),
    "seconds alone": (VALID.replace("[batch_former.enabled=true]", "{seconds: 3}"), "seconds"),
    "command with masks": (
        COMMAND.format('"x {output}"') + "overrides: [model.masks=true]\n",
        "arms.own.command: a command detects boxes",
    ),
    "equal commands": (
        COMMAND.format('"x {output}"').replace("seeds", '  more: {command: "x {output}"}\nseeds'),
        "arms.more has the same settings as arms.own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused(tmp_path: Path, name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(InputError) as raised:
        read_experiment(write(tmp_path, text))
    assert message in str(raised.value)
    assert "mine.yaml" in str(raised.value)


def test_arms_of_different_tasks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    path = write(tmp_path, "base: empty.yaml\narms: {a: [], b: [task=classification]}\nseeds: 1\n")
    with pytest.raises(InputError, match=r"arms\.b is of the task classification, arms\.a of detection"):
        read_experiment(path)


def test_masked_autoencoders_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("task: masked_autoencoding\n")
    text = VALID.replace("base.yaml", "empty.yaml").replace("batch_former.enabled", "data.check")
    with pytest.raises(InputError, match="runs of the task masked_autoencoding cannot be compared"):
        read_experiment(write(tmp_path, text))


def test_command_line_settings_that_make_arms_equal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has the same settings"):
        read_experiment(write(tmp_path, VALID), ["batch_former.enabled=true"])
    with pytest.raises(InputError, match="the command line sets seed"):
        read_experiment(write(tmp_path, VALID), ["seed=3"])


def test_a_command_is_part_of_the_settings_of_its_arm(tmp_path: Path) -> None:
    text = COMMAND.format("&line >-\n      x\n      {output}\n    , seconds: 60, train.epochs: 2")
    text = text.replace("{command:", "\n    command:").replace(
        "    , seconds: 60, train.epochs: 2}", "    seconds: 60\n    train: {epochs: 2}"
    )
    found = read_experiment(write(tmp_path, text))
    assert found.commands == {"own": {"command": "x {output}", "seconds": 60}}
    cell = ExperimentCell("own", 0, None)
    assert found.settings(cell) == {**flat_settings(found.config(cell)), "command": "x {output}", "seconds": 60}
    assert found.config(cell).train.epochs == 2
    assert read_experiment(write(tmp_path, text), quick=True).commands["own"]["seconds"] == 10
    text = text.replace("seconds: 60", "")
    assert read_experiment(write(tmp_path, text), quick=True).commands == {"own": {"command": "x {output}"}}


def test_folds_are_cells(tmp_path: Path) -> None:
    found = read_experiment(write(tmp_path, VALID + "folds: 3\n"))
    assert len(found.cells()) == 2 * 3 * 2
    assert [cell.name for cell in found.cells()][:4] == [
        "off/seed_0_fold_0",
        "two_stream/seed_0_fold_0",
        "off/seed_0_fold_1",
        "two_stream/seed_0_fold_1",
    ]
    cell = ExperimentCell("off", 1, 2)
    assert (found.config(cell).data.folds, found.config(cell).data.fold) == (3, 2)
    assert found.settings(cell) == flat_settings(found.config(cell))
    assert len(read_experiment(write(tmp_path, VALID + "folds: 3\n"), quick=True).cells()) == 2


@pytest.mark.parametrize("name", ["seed_3", "seed_3_fold_11"])
def test_names_of_cells_are_read_back(name: str) -> None:
    cell = ExperimentCell.named("off", name)
    assert cell is not None
    assert cell.name == f"off/{name}"
    assert ExperimentCell.named("off", f"{name}_x") is None


MEASURED_3 = ("deeppcb", "detectors", "dfine", "finetune", "yardstick")  # names of experiments with three seeds


@pytest.mark.default_tier("bccd", "small_data_digits", "yardstick_kangaroo")
@pytest.mark.parametrize("name", packaged_experiments())
def test_packaged_experiments_load(name: str) -> None:
    found = read_experiment(packaged_experiments()[name])
    assert len(found.seeds) * len(found.folds) >= (3 if name.startswith(MEASURED_3) else 5)
    detectors = ("deformable", "rtdetr")
    known = ("off", "off_8", "two_stream", "cross_entropy", "plain", "finetune_2m", "shift_0", "alone_0", *detectors)
    assert found.baseline in known


@pytest.mark.default_tier("long_tail_digits", "small_data_fashion_mnist")
@pytest.mark.parametrize("name", [x for x in packaged_experiments() if x.startswith(("long_tail", "small_data"))])
def test_arms_of_classifiers_differ_from_the_baseline_in_one_thing(name: str) -> None:
    found = read_experiment(packaged_experiments()[name])
    base = found.configs[found.baseline]
    assert base.train.eval_every == base.train.epochs, "only the last weights are measured"
    own = {"long_tail": "loss.name plugins.batchformer.", "small_data": "plugins. data.mix."}
    allowed = tuple(next(keys for stem, keys in own.items() if name.startswith(stem)).split())
    for arm, config in found.configs.items():
        one, other = flat_settings(config), flat_settings(base)
        changed = {key for key in one if one[key] != other[key]}
        assert bool(changed) == (arm != found.baseline)
        assert all(key.startswith(allowed) for key in changed)


@pytest.mark.parametrize("name", [name for name in packaged_experiments() if name.startswith("small_data")])
def test_subsets_are_drawn_by_the_seed_and_losses_have_a_matched_control(name: str) -> None:
    found = read_experiment(packaged_experiments()[name])
    losses = {"cosine", "contrastive", "mixing"}
    assert {(each, "patch_cutmix") for each in losses} | {("batchformer_v2", "self_only")} <= set(found.contrasts)
    control = flat_settings(found.configs["patch_cutmix"])
    for arm, config in found.configs.items():
        assert config.data.subset_seed is None
        assert config.data.per_class in (10, 100)
        if arm in losses | {"diverse_patch"}:
            own = flat_settings(config)
            changed = {key for key in own if own[key] != control[key]}
            assert changed == {f"plugins.diverse_patch.{each}" for each in (losses if arm not in losses else {arm})}
    one, other = (flat_settings(found.configs[arm]) for arm in ("batchformer_v2", "self_only"))
    assert {key for key in one if one[key] != other[key]} == {"plugins.batchformer_v2.mode"}


def test_learning_rates_of_the_batch_sizes_follow_their_rule() -> None:
    found = read_experiment(packaged_experiments()["bccd_batch_size"])
    base = found.configs[found.baseline]
    sizes = set()
    for arm, config in found.configs.items():
        sizes.add(config.train.batch_size)
        factor = config.train.batch_size / base.train.batch_size if arm.endswith("_linear") else 1
        for key in ("optimizer.lr", "optimizer.backbone_lr"):
            lr, expected = (reduce(getattr, key.split("."), each) for each in (config, base))
            assert lr == pytest.approx(factor * expected)
        assert config.train.epochs == base.train.epochs
    assert sizes == {2, 4, 8, 16}


@pytest.mark.default_tier("deeppcb", "digits")
@pytest.mark.parametrize("name", sorted(packaged_experiments()))
def test_every_arm_of_the_packaged_experiments_can_be_built(name: str) -> None:
    for config in read_experiment(packaged_experiments()[name]).configs.values():
        task_of(config).check_settings()
