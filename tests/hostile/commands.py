"""Wrong, missing, contradictory or malicious arguments of the tools."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from tests.hostile.annotations import fifo
from tests.hostile.battery import Build, Case, CaseFiles
from tests.hostile.images import encoded

# {G}: folder of the fixtures, {I}: one of its images
PREDICT = ("{G}/detector", "--output", "found", "--device", "cpu")
ARGUMENTS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {  # by tool: name -> arguments, required words
    "predict": {
        "nothing": ((), "required"),
        "no images": (PREDICT, "required"),
        "no image": (("{G}/detector", "--output", "found"), "IMAGE_OR_FOLDER"),
        "an unknown option": ((*PREDICT, "{I}", "--wings"), "--wings"),
        "a threshold of text": ((*PREDICT, "--threshold", "high", "{I}"), "threshold"),
        "a threshold of NaN": ((*PREDICT, "--threshold", "nan", "{I}"), "threshold"),
        "a threshold of 2": ((*PREDICT, "--threshold", "2", "{I}"), "threshold"),
        "a negative threshold": ((*PREDICT, "--threshold=-1", "{I}"), "threshold"),
        "an infinite threshold": ((*PREDICT, "--threshold", "inf", "{I}"), "threshold"),
        "an image that is missing": ((*PREDICT, "nowhere.jpg"), "nowhere.jpg"),
        "an image with NUL": ((*PREDICT, "a\0b.jpg"), "\\x00"),
        "an image of 5,000 letters": ((*PREDICT, "i" * 5000), "iiii"),
        "an image with escapes": ((*PREDICT, "\x1b]0;owned\x07\nFORGED\n.jpg"), "\\x1b"),
        "a web address": ((*PREDICT, "https://127.0.0.1:9/a.jpg"), "127.0.0.1"),
        "a folder without images": ((*PREDICT, "{G}/cache_of_nothing"), "nothing"),
        "a device that is none": (
            ("{G}/detector", "--output", "found", "--device", "toaster", "{I}"),
            "toaster",
        ),
        "a device beyond": (
            ("{G}/detector", "--output", "found", "--device", "cuda:99", "{I}"),
            "cuda:99",
        ),
        "a device with escapes": (
            ("{G}/detector", "--output", "found", "--device", "\x1b[2J", "{I}"),
            "\\x1b",
        ),
        "a device on meta": (("{G}/detector", "--output", "found", "--device", "meta", "{I}"), "meta"),
        "masks of a detector without": ((*PREDICT, "--panoptic", "{I}"), "mask"),
        "masks of a classifier": (
            ("{G}/classifier", "--output", "found", "--panoptic", "{I}"),
            "classifier",
        ),
        "a masked autoencoder": (("{G}/masked", "--output", "found", "{I}"), "masked"),
        "a checkpoint that is missing": (("nowhere", "--output", "found", "{I}"), "nowhere"),
        "a checkpoint in an empty folder": ((".", "--output", "found", "{I}"), "last.pt|."),
        "a checkpoint with NUL": (("a\0b", "--output", "found", "{I}"), "\\x00"),
        "a checkpoint of 5,000 letters": (("c" * 5000, "--output", "found", "{I}"), "cccc"),
        "a checkpoint that is an image": (("{I}", "--output", "found", "{I}"), "0101.png"),
        "a checkpoint that is a config": (
            ("{G}/detector.yaml", "--output", "found", "{I}"),
            "detector.yaml",
        ),
        "a capture as a checkpoint": (("{G}/capture.pt", "--output", "found", "{I}"), "capture.pt"),
    },
    "convert_checkpoint": {
        "nothing": ((), "required"),
        "one argument": (("{G}/detector",), "required"),
        "an unknown format": (("{G}/detector", "out.pt", "--to", "robbery"), "robbery"),
        "an unknown format with escapes": (("{G}/detector", "out.pt", "--to", "\x1b[2J"), "\\x1b"),
        "an unknown ending": (("{G}/detector", "out.docx", "--to", "detr"), "docx"),
        "no ending": (("{G}/detector", "out"), "out"),
        "two actions": (("{G}/detector", "out.pt", "--encoder", "--strip-plugins"), "not allowed"),
        "classes and an action": (("{G}/detector", "out.pt", "--classes", "contiguous", "--encoder"), "--classes"),
        "classes that are none": (("{G}/detector", "out.pt", "--classes", "many"), "many"),
        "classes that are not COCO's": (("{G}/detector", "out.pt", "--classes", "ids"), "classes"),
        "the source as the target": (("{G}/detector/last.pt", "{G}/detector/last.pt"), "last.pt"),
        "a folder as the target": (("{G}/detector", "."), "."),
        "a target in no folder": (("{G}/detector", "/proc/nowhere/out.pt"), "out.pt"),
        "a target of 300 letters": (("{G}/detector", "o" * 300 + ".pt"), "oooo"),
        "a target that is a pipe": (("{G}/detector", "pipe"), "pipe"),
        "a target with NUL": (("{G}/detector", "a\0b.pt"), "\\x00"),
        "a target below a file": (("{G}/detector", "notes.md/out.pt"), "notes.md"),
        "a source that is missing": (("nowhere.pt", "out.pt"), "nowhere.pt"),
        "a source that is an image": (("{I}", "out.pt"), "0101.png"),
        "a source with escapes": (("\x1b[2J.pt", "out.pt"), "\\x1b"),
        "a classifier as a detector": (("{G}/classifier", "out.pt", "--strip-batchformer"), "classifier"),
        "a detector as a classifier": (("{G}/detector", "out.pt", "--strip-plugins"), "detector"),
        "a detector as an autoencoder": (("{G}/detector", "out.pt", "--encoder"), "detector"),
        "a capture": (("{G}/capture.pt", "out.pt"), "capture.pt"),
        "names of another architecture": (
            ("{G}/detector", "out.pt", "--to", "hf_deformable_detr"),
            "detector|fit|name",
        ),
        "names of huggingface with batch attention": (
            ("{G}/detector", "out.pt", "--to", "hf_detr"),
            "strip-batchformer",
        ),
    },
    "compare": {
        "nothing": ((), "required"),
        "an experiment without a file": (("run",), "required"),
        "an experiment that is missing": (("run", "nowhere.yaml"), "nowhere.yaml"),
        "an experiment of no name": (("run", ""), "experiment file"),
        "an experiment with NUL": (("run", "a\0b.yaml"), "\\x00"),
        "an experiment with escapes": (("run", "\x1b]0;owned\x07.yaml"), "\\x1b"),
        "an experiment of 5,000 letters": (("run", "e" * 5000), "eeee"),
        "an experiment that is a config": (("run", "{G}/detector.yaml"), "unknown key"),
        "an experiment that is an image": (("run", "{I}"), "0101.png"),
        "an experiment that is a pipe": (("run", "pipe"), "pipe"),
        "an experiment that is deep": (("run", "deep.json"), "deep.json"),
        "jobs of text": (("run", "long_tail_digits", "--jobs", "many"), "jobs"),
        "negative jobs": (("run", "long_tail_digits", "--jobs=-2"), "jobs"),
        "an unknown setting": (("run", "long_tail_digits", "model.wings=2"), "model.wings"),
        "a setting with escapes": (("run", "long_tail_digits", "--print", "model.name=\x1b[2J"), "\\x1b"),
        "a report on nothing": (("report", "nowhere"), "nowhere"),
        "a report on an empty folder": (("report", "."), "cells"),
        "a report on a file": (("report", "notes.md"), "notes.md"),
        "a report on NUL": (("report", "a\0b"), "\\x00"),
        "a command that is missing": (("command", "nowhere {output}", "{G}/detector.yaml"), "nowhere"),
        "a command without output": (("command", "true", "{G}/detector.yaml"), "output"),
        "a command with escapes": (("command", "true {output} \x1b[2J", "{G}/detector.yaml"), "\\x1b"),
        "a command of NaN seconds": (("command", "true {output}", "{G}/detector.yaml", "--seconds", "nan"), "seconds"),
        "a run that is missing": (("nowhere", "{G}/detector"), "nowhere"),
        "a run with escapes": (("\x1b[2J", "{G}/detector"), "\\x1b"),
        "a run that is a file": (("notes.md",), "notes.md"),
    },
    "plan": {
        "no GPUs": (("--gpus", "0"), "gpus"),
        "negative GPUs": (("--gpus=-1",), "gpus"),
        "GPUs of text": (("--gpus", "many"), "gpus"),
        "2**70 GPUs": (("--gpus", str(2**70)), "gpus"),
        "a GPU that is none": (("--gpu", "toaster"), "toaster"),
        "a GPU with escapes": (("--gpu", "\x1b[2J"), "\\x1b"),
        "memory of NaN": (("--gpu-memory", "nan"), "memory"),
        "memory of 0": (("--gpu-memory", "0"), "memory"),
        "negative memory": (("--gpu-memory=-5",), "memory"),
        "infinite memory": (("--gpu-memory", "inf"), "memory"),
        "no images": (("--images", "0"), "images"),
        "negative images": (("--images=-5",), "images"),
        "no classes": (("--classes", "0"), "classes"),
        "negative classes": (("--classes=-1",), "classes"),
        "2**62 classes": (("--classes", str(2**62)), "classes"),
        "a batch of 0": (("--published-batch", "0"), "batch"),
        "a step of 0 seconds": (("--seconds-per-step", "0"), "seconds"),
        "a step of NaN seconds": (("--seconds-per-step", "nan"), "seconds"),
        "a step of infinite seconds": (("--seconds-per-step", "inf"), "seconds"),
        "negative TFLOPS": (("--tflops=-1",), "tflops"),
        "TFLOPS of NaN": (("--tflops", "nan"), "tflops"),
        "two times": (("--tflops", "5", "--seconds-per-step", "1"), "not allowed"),
        "a measurement that is missing": (("--measured", "nowhere.json"), "nowhere.json"),
        "a measurement that is a folder": (("--measured", "."), "."),
        "a measurement that is a text": (("--measured", "notes.md"), "notes.md"),
        "a measurement that is binary": (("--measured", "{I}"), "0101.png"),
        "a measurement of nonsense": (("--measured", "nonsense.json"), "nonsense.json"),
        "a measurement that is deep": (("--measured", "deep.json"), "deep.json"),
        "a measurement of NaN": (("--measured", "nan.json"), "nan.json"),
        "a measurement that is a pipe": (("--measured", "pipe"), "pipe"),
        "JSON into a folder": (("--json", "."), "."),
        "JSON below a file": (("--json", "notes.md/plan.json"), "notes.md"),
        "JSON into a pipe": (("--json", "pipe"), "pipe"),
        "JSON into /proc": (("--json", "/proc/plan.json"), "plan.json"),
        "JSON with NUL": (("--json", "a\0b"), "\\x00"),
        "a config that is missing": (("--config", "nowhere.yaml"), "nowhere.yaml"),
        "a config of a classifier": (("--config", "{G}/classifier.yaml"), "classification"),
        "a setting of text": (("train.epochs=many",), "epochs"),
    },
    "report": {
        "nothing": ((), "required"),
        "a run that is missing": (("nowhere",), "nowhere"),
        "a run that is a file": (("notes.md",), "notes.md"),
        "a run that is an image": (("{I}",), "0101.png"),
        "a run with NUL": (("a\0b",), "\\x00"),
        "a run with escapes": (("\x1b[2J",), "\\x1b"),
        "a run of 5,000 letters": (("e" * 5000,), "eeee"),
        "a folder that is no run": ((".",), "config.yaml"),
        "a second run that is missing": (("{G}/detector", "nowhere"), "nowhere"),
        "a run twice": (("{G}/detector", "{G}/detector/."), "twice"),
        "a page for one run": (("{G}/detector", "--output", "new.html"), "output"),
        "a page in place of notes": (("{G}/detector", "{G}/classifier", "--output", "notes.md"), "notes.md"),
        "a page that is a folder": (("{G}/detector", "{G}/classifier", "--output", "."), "."),
        "a page below a file": (("{G}/detector", "{G}/classifier", "--output", "notes.md/a.html"), "notes.md"),
        "a page with NUL": (("{G}/detector", "{G}/classifier", "--output", "a\0b"), "\\x00"),
    },
    "check_data": {
        "a copy that is a file": (("--config", "{G}/detector.yaml", "--fix", "notes.md"), "notes.md"),
        "a copy inside of the images": (("--config", "{G}/detector.yaml", "--fix", "{G}/train/images/new"), "inside"),
        "a copy with NUL": (("--config", "{G}/detector.yaml", "--fix", "a\0b"), "\\x00"),
        "a copy of 300 letters": (("--config", "{G}/detector.yaml", "--fix", "f" * 300), "ffff"),
        "a copy in /proc": (("--config", "{G}/detector.yaml", "--fix", "/proc/made"), "made"),
        "a copy beside foreign files": (("--config", "{G}/detector.yaml", "--fix", "."), "empty folder"),
        "a copy of a classifier's data": (("--config", "{G}/classifier.yaml", "--fix", "made"), "task=classification"),
        "a copy of panoptic data": (("--config", "{G}/masks.yaml", "--fix", "made"), "panoptic"),
        "a copy and a sheet": (
            ("--config", "{G}/detector.yaml", "--fix", "made", "--show-augmented", "sheet.png"),
            "exclude",
        ),
        "no data": ((), "give the folder of a data set, a config or a run"),
        "a config that is missing": (("--config", "nowhere.yaml"), "nowhere.yaml"),
        "a config that is an image": (("--config", "{I}"), "0101.png"),
        "a config with NUL": (("--config", "a\0b"), "\\x00"),
        "an unknown option": (("--wings",), "--wings"),
        "a setting that is none": (("--config", "{G}/detector.yaml", "wings=4"), "wings"),
        "a setting of another task": (("--config", "{G}/detector.yaml", "task=classification"), "task|classif"),
        "a sheet in place of a large picture": (
            ("--config", "{G}/detector.yaml", "--show-augmented", "large.png"),
            "not written by this command",
        ),
    },
    "replay_capture": {
        "nothing": ((), "required"),
        "a file that is missing": (("nowhere.pt",), "nowhere.pt"),
        "a file with NUL": (("a\0b",), "\\x00"),
        "a folder": ((".",), "."),
        "an image": (("{I}",), "0101.png"),
        "a precision that is none": (("{G}/capture.pt", "--precision", "float8"), "float8"),
        "a precision with escapes": (("{G}/capture.pt", "--precision", "\x1b[2J"), "\\x1b"),
        "a device that is none": (("{G}/capture.pt", "--device", "toaster"), "toaster"),
    },
    "analyze": {
        "nothing": ((), "required"),
        "no run": (("attention-entropy", "--output", "looked"), "RUN"),
        "an analysis that is none": (("robbery", "{G}/classifier", "--output", "looked"), "robbery"),
        "a run that is missing": (("attention-entropy", "nowhere", "--output", "looked"), "nowhere"),
        "a run twice": (
            ("attention-entropy", "{G}/classifier", "{G}/classifier", "--output", "looked"),
            "twice",
        ),
        "a run of a detector": (("attention-entropy", "{G}/detector", "--output", "looked"), "detector"),
        "a run of an autoencoder": (("attention-entropy", "{G}/masked", "--output", "looked"), "masked"),
        "no images": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "--images", "0"),
            "images",
        ),
        "a batch of 0": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "--batch-size", "0"),
            "batch",
        ),
        "a format that is none": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "--format", "docx"),
            "docx",
        ),
        "a format with a path": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "--format", "png/../../x.png"),
            "png",
        ),
        "epsilons of text": (
            ("fgsm", "{G}/classifier", "--output", "looked", "--epsilons", "a,b"),
            "epsilons",
        ),
        "epsilons of NaN": (("fgsm", "{G}/classifier", "--output", "looked", "--epsilons", "nan"), "epsilons"),
        "negative epsilons": (("fgsm", "{G}/classifier", "--output", "looked", "--epsilons=-1"), "epsilons"),
        "no epsilons": (("fgsm", "{G}/classifier", "--output", "looked", "--epsilons", ""), "epsilons"),
        "a patch of 0": (("missing-patches", "{G}/classifier", "--output", "looked", "--patch", "0"), "patch"),
        "a patch of 10,000": (
            ("missing-patches", "{G}/classifier", "--output", "looked", "--patch", "10000"),
            "patch",
        ),
        "a device that is none": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "--device", "toaster"),
            "toaster",
        ),
        "an output that is a file": (
            ("attention-entropy", "{G}/classifier", "--output", "notes.md"),
            "notes.md",
        ),
        "a setting that is none": (
            ("attention-entropy", "{G}/classifier", "--output", "looked", "wings=4"),
            "wings",
        ),
        "data that are gone": (
            ("fgsm", "{G}/classifier", "--output", "looked", "data.root=nowhere"),
            "nowhere",
        ),
    },
    "make_sample_data": {
        "nothing": ((), "required"),
        "a set that is none": (("robbery", "--output", "made"), "robbery"),
        "no images": (("scenes", "--output", "made", "--num-train", "0"), "num_train|num-train"),
        "negative images": (("scenes", "--output", "made", "--num-val=-1"), "num_val|num-val"),
        "an image size of 3": (("scenes", "--output", "made", "--image-size", "3"), "image_size|image-size"),
        "an image size of 2**40": (
            ("scenes", "--output", "made", "--image-size", str(2**40)),
            "image_size|image-size|size",
        ),
        "a negative seed": (("scenes", "--output", "made", "--seed=-1"), "seed"),
        "a contrast of 0": (("pairs", "--output", "made", "--contrast", "0"), "contrast"),
        "a contrast of scenes": (("scenes", "--output", "made", "--contrast", "24"), "contrast"),
        "an output that is a file": (("scenes", "--output", "notes.md"), "notes.md"),
        "an output with foreign files": (("scenes", "--output", "."), "work"),
        "an output in /proc": (("scenes", "--output", "/proc/made", "--num-train", "1", "--num-val", "1"), "made"),
        "an output with NUL": (("scenes", "--output", "a\0b"), "\\x00"),
        "an output of 300 letters": (("scenes", "--output", "m" * 300, "--num-train", "1", "--num-val", "1"), "mmmm"),
    },
    "train_net": {
        "a dry run of a run": (("--config", "{G}/detector.yaml", "output_dir={G}/detector", "--dry-run"), "detector"),
        "a dry run into a file": (("--config", "{G}/detector.yaml", "output_dir=notes.md", "--dry-run"), "notes.md"),
        "a dry run and resuming": (("--config", "{G}/detector.yaml", "--dry-run", "--resume"), "exclude"),
        "a dry run from a text": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "init_from=notes.md", "--dry-run"),
            "notes.md",
        ),
        "nothing": ((), "give a config"),
        "no file behind the option": (("--config",), "--config"),
        "an unknown option": (("--config", "{G}/detector.yaml", "--wings"), "--wings"),
        "evaluating and resuming": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "--eval-only", "--auto-resume"),
            "exclude",
        ),
        "a config of a classifier with another task": (("--config", "{G}/classifier.yaml", "task=detection"), "task"),
        "a packaged config that does not exist": (("detr_r50_bvf2",), "detr_r50_bfv2"),
        "evaluating a classifier": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "--eval-only", "init_from={G}/classifier"),
            "classif|architecture|fit",
        ),
        "evaluating an autoencoder": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "--eval-only", "init_from={G}/masked"),
            "masked|architecture|fit",
        ),
        "evaluating a text": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "--eval-only", "init_from=notes.md"),
            "notes.md",
        ),
        "evaluating another model": (
            (
                "--config",
                "{G}/detector.yaml",
                "output_dir=run",
                "--eval-only",
                "init_from={G}/detector",
                "model.hidden_dim=8",
            ),
            "architecture|shape",
        ),
        "starting from a classifier": (
            ("--config", "{G}/detector.yaml", "output_dir=run", "init_from={G}/classifier"),
            "fit|classif",
        ),
        "evaluating a detector as a classifier": (
            ("--config", "{G}/classifier.yaml", "output_dir=run", "--eval-only", "init_from={G}/detector"),
            "detect|architecture|class",
        ),
        "a classifier from a detector": (
            ("--config", "{G}/classifier.yaml", "output_dir=run", "init_from={G}/detector"),
            "fit|detect",
        ),
        "a classifier from a text": (
            ("--config", "{G}/classifier.yaml", "output_dir=run", "init_from=notes.md"),
            "notes.md",
        ),
        "evaluating a detector as an autoencoder": (
            ("--config", "{G}/masked.yaml", "output_dir=run", "--eval-only", "init_from={G}/detector"),
            "detect|architecture|fit",
        ),
    },
}


def tool(name: str, arguments: tuple[str, ...]) -> Build:
    """Run the tool with these arguments."""

    def build(files: CaseFiles) -> Callable[[], Any]:
        files.write(
            "nonsense.json", json.dumps({"rows": [{"precision": [], "batch_size": {}, "step": 5}], "height": "x"})
        )
        files.write("deep.json", "[" * 100_000 + "]" * 100_000)
        row = {"precision": "float32", "batch_size": 3, "step": {"median": float("nan")}}
        files.write("nan.json", json.dumps({"rows": [row], "height": 800, "width": 1066, "recipe": "x"}))
        fifo(files.folder / "pipe")
        files.write("more.png", encoded("PNG"))
        if "large.png" in arguments:
            os.truncate(files.write("large.png", encoded("PNG")), 300 * 2**20)
        image = files.fixtures / "val" / "images" / "0101.png"
        given = [each.replace("{G}", str(files.fixtures)).replace("{I}", str(image)) for each in arguments]
        main = importlib.import_module(f"tools.{name}").main
        if name == "plan" and "--config" not in given:
            given = ["--config", str(files.fixtures / "detector.yaml"), *given]
        return lambda: main(given)

    return build


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    for name, table in ARGUMENTS.items():
        for title, (arguments, word) in table.items():
            yield Case("commands", f"{name}: {title}", tool(name, arguments), says=(word,))
