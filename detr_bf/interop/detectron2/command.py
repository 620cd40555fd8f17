"""The command line that both training tools share; detectron2 is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence

import detr_bf.interop.detectron2 as door
from detr_bf.cli import run_tool
from detr_bf.errors import InputError


def command(name: str, arguments: Sequence[str] | None) -> int:
    """Launch ``train_yacs`` or ``train_lazy`` in as many processes as asked for, and return the exit code."""

    def run() -> int:
        try:
            function = getattr(door, name)
        except ImportError as error:
            raise InputError(str(error)) from error
        from detectron2.engine import default_argument_parser, launch

        options = default_argument_parser().parse_args(arguments)
        if not options.config_file:
            raise InputError("give a config with --config-file FILE; examples stand in configs/detectron2")
        launch(
            function,
            options.num_gpus,
            num_machines=options.num_machines,
            machine_rank=options.machine_rank,
            dist_url=options.dist_url,
            args=(options,),
        )
        return 0

    return run_tool(run)
