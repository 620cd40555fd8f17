"""Arguments of the commands that use trained models, which are read without importing torch.

Each function reads the words after the name of a command. Help and wrong arguments end the program (SystemExit).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from detr_bf.commands.arguments import RUN_HELP, TRAINED_HELP, command_parser

# Names that the modules of the commands know only after importing torch; a test compares them.
_OBJECT_FORMATS = ("json", "jsonl", "csv", "coco", "yolo", "labelme")
_DEFAULT_THRESHOLD = 0.5  # without an evaluation
TOKEN_VARIABLE = "DETR_BF_TOKEN"
_NUMBERINGS = ("contiguous", "ids")
_FIGURE_FORMATS = ("svg", "png", "pdf")
ANALYSIS_NAMES = (
    "batch-attention",
    "queries",
    "panoptic",
    "mini-batch-inference",
    "attention-entropy",
    "class-token-entropy",
    "attention-distance",
    "scale-ratios",
    "patch-similarity",
    "gradient-influence",
    "grad-cam",
    "feature-maps",
    "occlusion",
    "missing-patches",
    "fgsm",
    "corruptions",
)


def _add_nms(parser: argparse.ArgumentParser) -> None:
    """Add the options that become the settings ``eval.nms`` and ``eval.nms_across_classes`` in ``overrides``."""
    parser.add_argument(
        "--nms",
        dest="overrides",
        action="append",
        type="eval.nms={}".format,
        default=[],
        metavar="IOU",
        help="leave out detections whose IoU with a better one of their class is larger, such as 0.7; null: none "
        "(default: eval.nms of RUN)",
    )
    parser.add_argument(
        "--nms-across-classes",
        dest="overrides",
        action="append_const",
        const="eval.nms_across_classes=true",
        help="with --nms, or eval.nms of RUN: compare detections of different classes, too",
    )


_PREDICT = """Detect objects in images, or classify images or their pixels, and write pictures, JSON or maps.

detr-bf predict runs/demo photo.jpg folder/ --output predictions

A video file, or the address of a stream, is a single input: predictions.jsonl has a line for each frame. Ctrl-C ends
it, and the frames before are kept.

With a classifier's run, the five most probable classes of each image are printed and written as JSON and one sheet.

A detector that compares each image with its reference, such as the picture of a board without defects, needs
--reference: one file for all images and frames, or a folder with a file of the name of each image.

Unreadable images are skipped and listed at the end, and the exit code is 1. In the output folder, which may also hold
the images, only files that this command wrote before are replaced.
"""


def predict_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf predict``."""
    parser = command_parser(_PREDICT)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IMAGE_OR_FOLDER",
        help="files, folders, patterns such as 'day*/**/*.jpg', or - for file names on standard input, one a line; or "
        "a video",
    )
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="for pictures and predictions.json")
    parser.add_argument(
        "--threshold",
        metavar="SCORE",
        help="least score that is kept, or 'class' for one of each class (default: the one with the highest F1 in the "
        f"evaluation of the checkpoint, {_DEFAULT_THRESHOLD} without an evaluation; for classifiers 0)",
    )
    _add_nms(parser)
    parser.add_argument("--panoptic", action="store_true", help="panoptic maps instead of boxes (needs a mask head)")
    parser.add_argument(
        "--format",
        choices=_OBJECT_FORMATS,
        help="of the objects: json (predictions.json, the default), jsonl (a line for each image or frame), csv (a row "
        "for each object), coco (a COCO data set with scores, for labelling tools), yolo (a label file without "
        "scores for each image; polygons with a mask head) or labelme (a JSON file for each image)",
    )
    parser.add_argument(
        "--save-pictures", action=argparse.BooleanOptionalAction, help="draw each image (the default), not each frame"
    )
    parser.add_argument("--every", type=int, metavar="N", help="of a video: only each N-th frame, the first included")
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        help="of a stream: only the newest frame, so that the delay does not grow (the default of streams without an "
        "end); --no-live takes every frame",
    )
    parser.add_argument(
        "--reconnect", action="store_true", help="open a stream again that fails, ends or sends no data for 30 s"
    )
    parser.add_argument(
        "--tile",
        nargs=2,
        type=int,
        metavar=("SIZE", "OVERLAP"),
        help="detect in squares of SIZE pixels that overlap by OVERLAP and join the objects at their borders",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE_OR_DIR",
        help="of a detector that compares: the reference of all images, or a folder with one of each image's name",
    )
    parser.add_argument("--half", action="store_true", help="float16 on a GPU, bfloat16 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_intermixed_args(given)


_SERVE = """Serve a detector over HTTP: POST an image to /predict, and the answer is its objects as JSON.

detr-bf serve runs/mine
detr-bf serve runs/mine --port 0 --batch-size 4 --max-wait 10 --token-file token.txt
curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict

Needs pip install 'detr_bf[serve]'. The token is read from a file or from DETR_BF_TOKEN, so that it is not in the list
of processes. SIGTERM and Ctrl-C end it with exit code 0 after the accepted requests are answered. docs/serving.md has
more.

curl -F image=@board.png -F reference=@template.png http://127.0.0.1:8000/predict

A detector that compares each image with its reference gets both as a form, or the images alone with --reference FILE.
"""


def serve_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf serve``."""
    parser = command_parser(_SERVE)
    parser.add_argument("run", metavar="RUN", help=f"detector: {RUN_HELP}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any free one (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="most images of a pass (%(default)s)")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=5.0,
        metavar="MS",
        help="milliseconds that an image waits for others while the model is idle (%(default)s)",
    )
    parser.add_argument("--queue", type=int, default=64, metavar="N", help="most requests in work (%(default)s)")
    parser.add_argument("--max-bytes", type=int, default=2**24, metavar="N", help="of an image file (%(default)s)")
    parser.add_argument("--max-pixels", type=int, default=50_000_000, metavar="N", help="of an image (%(default)s)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds of a request (%(default)s)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token that requests must give ({TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--threshold",
        metavar="SCORE",
        help="least score of requests that give none, or 'class' for one of each class (default: the one with the "
        f"highest F1 in the evaluation of the checkpoint, {_DEFAULT_THRESHOLD} without an evaluation)",
    )
    _add_nms(parser)
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="of a detector that compares: the reference of the images that come without one",
    )
    parser.add_argument("--half", action="store_true", help="float16 on a GPU, bfloat16 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_args(given)


_EXPORT = """Write a detector for another program or as machine code, and compare its outputs with those of torch.

detr-bf export runs/mine --output mine.onnx                      # any number of images of any size
detr-bf export runs/mine --output mine.onnx --batch 1 --size 640x640 --with-postprocess
detr-bf export detr_r50 --output detr.onnx --images photos       # published weights, compared on these images
detr-bf export runs/mine --output half.onnx --half --evaluate 200
detr-bf export runs/mine --output int8.onnx --int8 photos --evaluate 200
detr-bf export runs/pairs --output pairs.onnx --images photos --references templates   # with an input for references
detr-bf export runs/mine --output mine.xml                       # OpenVINO: mine.xml, and the weights in mine.bin
detr-bf export runs/mine --output mine.pt2 --size 640x640        # compiled by AOTInductor for processors like this one
detr-bf export runs/mine --output mine.pte --batch 1 --size 640x640      # ExecuTorch; .tflite: LiteRT
detr-bf export runs/mine --output mine.mlpackage --batch 1 --size 640x640    # Core ML, which is not compared

The images to compare with are those of --images, else the first validation images of the run, else synthetic ones. If
an output differs by more than its tolerance, nothing is written and the exit code is 1; --half and --int8 have no
tolerance, --evaluate says what they cost. detr_bf.load and 'detr-bf predict' read the file.
"""


def export_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf export``."""
    parser = command_parser(_EXPORT)
    parser.add_argument("run", metavar="RUN", help=f"detector: {TRAINED_HELP}")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help="file to write: .onnx, .xml (OpenVINO), .pt2 (AOTInductor), .pte (ExecuTorch), .tflite (LiteRT) or "
        ".mlpackage (Core ML)",
    )
    parser.add_argument("--batch", default="dynamic", metavar="dynamic|N", help="images of a call (default: dynamic)")
    parser.add_argument(
        "--size",
        default="dynamic",
        metavar="dynamic|HxW",
        help="height and width in pixels of the images after padding (default: dynamic)",
    )
    parser.add_argument(
        "--with-postprocess", action="store_true", help="the outputs are scores, labels and boxes instead of logits"
    )
    _add_nms(parser)
    parser.add_argument("--images", metavar="DIR", type=Path, help="compare the outputs on images of this folder")
    parser.add_argument(
        "--references",
        metavar="DIR",
        type=Path,
        help="references of the images of --images and --int8, files of the same names, if RUN reads references in "
        "evaluation (default: those that its data name)",
    )
    parser.add_argument("--license", metavar="ID", help="of the weights, for the metadata, such as apache-2.0")
    parser.add_argument("--half", action="store_true", help="float16 weights; inputs and outputs stay as they are")
    parser.add_argument(
        "--int8", metavar="DIR", type=Path, help="int8 weights and activations, calibrated with images of this folder"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda: where a .pt2 file computes (default: cpu)")
    parser.add_argument(
        "--evaluate",
        metavar="N",
        help="compare the AP of torch and of the file on the first N validation images of the run; 0: on all",
    )
    return parser.parse_args(given)


_BENCHMARK = """Measure how fast a detector finds objects on this machine, by format, precision, batch size and threads.

detr-bf benchmark runs/mine                                  # torch, one image at a time
detr-bf benchmark runs/mine mine.onnx --batch-sizes 1 4 --threads 1 2 --output bench.json
detr-bf benchmark runs/mine --half --device cuda --batch-sizes 1 8 32

In each round every RUN detects once in the same images,
in one process, so that other work on the machine slows all of them; ratios are those of a round. The times are of a
whole call: resizing, network, and boxes in the original image, without reading files. Memory is that of a new process
with this source alone, at the first number of threads.
"""


def benchmark_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf benchmark``."""
    parser = command_parser(_BENCHMARK)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"detector: {RUN_HELP}")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1], metavar="N", help="images of a call")
    parser.add_argument(
        "--threads", nargs="+", type=int, metavar="N", help="threads of a CPU (default: as many as torch takes)"
    )
    parser.add_argument("--half", action="store_true", help="also bfloat16 (float16 on a GPU) of each torch source")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="calls of each candidate (default: 20)")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="photographs (default: synthetic ones of several sizes)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; exported files: their own")
    parser.add_argument("--no-memory", action="store_true", help="do not start processes that measure memory")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for all numbers and the machine")
    return parser.parse_args(given)


_CONVERT = """Read a checkpoint of any known implementation and write it under our names, another's or timm's.

detr-bf convert detr-r50-e632da11.pth detr_r50.pth                # then init_from=detr_r50.pth
detr-bf convert detr_r50 detr_r50.pth                             # published weights, downloaded
detr-bf convert runs/mine plain.pt --strip-batchformer            # the same detector without it
detr-bf convert plain.pt model.safetensors --to hf_deformable_detr   # for transformers
detr-bf convert runs/mine model.pth --to detectron2                  # for our detectron2 adapter
detr-bf convert detr-r50-e632da11.pth coco.pth --classes contiguous   # 80 classes instead of 91 ids
detr-bf convert runs/classifier vit.safetensors --strip-plugins      # for timm
detr-bf convert runs/mae encoder.safetensors --encoder               # for timm, without classes

OUT ends in .pth, .pt, .bin or .safetensors. Foreign names are written where their own code looks for them: under
'model' for the authors' repositories and detectron2, by themselves for Hugging Face and in .safetensors files. The
authors' heads for COCO have a row for every category id; ours, and detectron2's data sets, one for every class.
"""


def convert_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf convert``."""
    parser = command_parser(_CONVERT)
    parser.add_argument("run", metavar="RUN", help="run folder, checkpoint, file of weights, or name of published ones")
    parser.add_argument("target", metavar="OUT", type=Path, help="file to write")
    parser.add_argument(
        "--classes",
        choices=_NUMBERINGS,
        help="rows of class heads for COCO: one for each class, or one for each category id; default: as they are",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--to",
        metavar="NAME",
        help="write the names of another project, such as detr, rtdetr, hf_deformable_detr or detectron2; an unknown "
        "one lists all; default: ours",
    )
    action.add_argument(
        "--strip-batchformer",
        dest="task",
        action="store_const",
        const="detection",
        help="write a checkpoint of ours without batch attention, after proving that evaluation stays the same",
    )
    action.add_argument(
        "--strip-plugins",
        dest="task",
        action="store_const",
        const="classification",
        help="write a classifier's weights for the network alone, after proving that evaluation stays the same",
    )
    action.add_argument(
        "--encoder",
        dest="task",
        action="store_const",
        const="masked_autoencoding",
        help="write the encoder of a masked autoencoder or of contrastive pre-training",
    )
    action.add_argument(
        "--strip-auxiliary",
        dest="task",
        action="store_const",
        const="segmentation",
        help="write the weights of a segmentation network without the head that only training uses",
    )
    options = parser.parse_args(given)
    if options.classes and options.task:
        parser.error("--classes goes with --to, or with neither --strip-... nor --encoder")
    return options


_ANALYZE = """Analyse trained models: writes OUTPUT/NAME.csv and a picture that compares the runs.

detr-bf analyze batch-attention runs/mine --output pictures --auto 3
detr-bf analyze batch-attention runs/mine --output pictures --image photo.jpg --point 120,80
detr-bf analyze attention-entropy runs/plain runs/broadcasting --output pictures
detr-bf analyze fgsm runs/plain --output pictures --images 10000 --epsilons 1,2 data.root=DIR
detr-bf analyze patch-similarity runs/plain --output pictures --split train --images 10000
detr-bf analyze mini-batch-inference runs/mine --output tables --batch-size 24 --seed 1
detr-bf analyze corruptions runs/plain runs/broadcasting --output pictures

batch-attention and feature-maps are for detectors and classifiers; queries, panoptic and mini-batch-inference (a table
without a picture) are for detectors; corruptions is for segmentation networks; all others are for classifiers.
"""


def analyze_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf analyze``."""
    parser = command_parser(_ANALYZE)
    parser.add_argument("name", choices=ANALYSIS_NAMES, metavar="NAME", help=", ".join(ANALYSIS_NAMES))
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN|key=value",
        help="run folders or checkpoints to compare, and settings of all of them, such as data.root=DIR",
    )
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="for the table and the picture")
    images_help = "Take N random images; for batch-attention, batches of N images. The default depends on NAME."
    parser.add_argument("--images", metavar="N", type=int, help=images_help)
    split_help = "Take images of this split. Training images are for classifiers only, and are not augmented."
    parser.add_argument("--split", choices=["train", "val"], default="val", help=split_help)
    size_help = "Load N images at a time. The default is 64; for mini-batch-inference it is that of the training."
    parser.add_argument("--batch-size", metavar="N", type=int, help=size_help)
    seed_help = "Choose the images, and for mini-batch-inference their order, with this seed. The default is 0."
    parser.add_argument("--seed", metavar="N", type=int, help=seed_help)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--format", choices=_FIGURE_FORMATS, help="Write the picture in this format. The default is png."
    )
    parser.add_argument("--epsilons", metavar="A,B,...", help="fgsm: steps in 255ths; default 0,1,2,4,8")
    parser.add_argument(
        "--patch", metavar="N", type=int, help="missing-patches: side of a patch in pixels; default by model"
    )
    places = parser.add_argument_group("of detectors, and batch-attention")
    places.add_argument("--image", metavar="NAME", help="validation image to look at; default: random")
    places.add_argument("--point", metavar="X,Y", help="in pixels of the image; default: centre of its largest object")
    places.add_argument("--auto", metavar="N", type=int, help="so many random images; default 3")
    places.add_argument("--layer", metavar="N", type=int, help="encoder layer of the maps; default: the first")
    places.add_argument("--level", metavar="N", type=int, default=0, help="level of the maps; default 0, the finest")
    places.add_argument("--untrained", action="store_true", help="also show each run before its training")
    options = parser.parse_intermixed_args(given)
    words = options.runs
    options.overrides = [text for text in words if "=" in text and not os.path.lexists(text)]
    options.runs = [text for text in words if text not in options.overrides]
    if not options.runs:
        parser.error("give a RUN")
    return options
