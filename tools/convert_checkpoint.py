"""Read a checkpoint of any known implementation and write it under our names, another's or timm's.

python tools/convert_checkpoint.py detr-r50-e632da11.pth detr_r50.pth                # then init_from=detr_r50.pth
python tools/convert_checkpoint.py runs/mine plain.pt --strip-batchformer            # the same detector without it
python tools/convert_checkpoint.py plain.pt model.safetensors --to hf_deformable_detr   # for transformers
python tools/convert_checkpoint.py runs/mine model.pth --to detectron2                  # for our detectron2 adapter
python tools/convert_checkpoint.py detr-r50-e632da11.pth coco.pth --classes contiguous   # 80 classes instead of 91 ids
python tools/convert_checkpoint.py runs/classifier vit.safetensors --strip-plugins      # for timm
python tools/convert_checkpoint.py runs/mae encoder.safetensors --encoder               # for timm, without classes

OUT ends in .pth, .pt, .bin or .safetensors. Foreign names are written where their own code looks for them: under
'model' for the authors' repositories and detectron2, by themselves for Hugging Face and in .safetensors files. The
authors' heads for COCO have a row for every category id; ours, and detectron2's data sets, one for every class.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from detr_bf import interop
from detr_bf.cli import run_tool
from detr_bf.conversion import convert, strip_batch_former, strip_plugins, write_encoder
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", type=Path, help="run folder, checkpoint or file of weights")
    parser.add_argument("target", metavar="OUT", type=Path, help="file to write")
    parser.add_argument(
        "--classes",
        choices=interop.NUMBERINGS,
        help="rows of class heads for COCO: one for each class, or one for each category id; default: as they are",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--to", metavar="NAME", help=f"write the names of {', '.join(interop.NAMES)}; default: ours")
    action.add_argument(
        "--strip-batchformer",
        action="store_true",
        help="write a checkpoint of ours without batch attention, after proving that evaluation stays the same",
    )
    action.add_argument(
        "--strip-plugins",
        action="store_true",
        help="write a classifier's weights for the network alone, after proving that evaluation stays the same",
    )
    action.add_argument("--encoder", action="store_true", help="write the encoder of a masked autoencoder")
    options = parser.parse_args(arguments)
    if options.classes and (options.strip_batchformer or options.strip_plugins or options.encoder):
        parser.error("--classes goes with --to, or with neither --strip-... nor --encoder")

    def run() -> int:
        if options.strip_batchformer:
            done = strip_batch_former(options.source, options.target)
        elif options.strip_plugins:
            done = strip_plugins(options.source, options.target)
        elif options.encoder:
            done = write_encoder(options.source, options.target)
        else:
            done = convert(options.source, options.target, options.to, options.classes)
        print(safe_message(done))
        return 0

    return run_tool(run)


if __name__ == "__main__":
    sys.exit(main())
