"""What the data sheets of GPUs say, and how long work takes on them at best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from detr_bf.errors import InputError
from detr_bf.planning.recorder import Work

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Gpu:
    """Peak rates of dense arithmetic in TFLOP/s; memory in GB of 2**30 bytes."""

    title: str
    float32: float
    tf32: float  # of convolutions in float32, where torch allows it by default; float32's on GPUs that lack it
    half: float  # fp16 and bf16 on tensor cores, sums in float32
    memory: float
    bandwidth: float  # GB/s, of 10**9 bytes
    bf16: bool = True

    def peak(self, kind: str) -> float:
        """In FLOP/s, of a kind of :class:`Work`."""
        return TERA * {"float32": self.float32, "convolution": self.tf32, "half": self.half}[kind]

    def least_seconds(self, work: Iterable[Work]) -> float:
        """One operator after the other, each at the peak rate of its arithmetic or of memory, whichever is slower."""
        return sum(
            item.times * max(item.flops / self.peak(item.kind), item.moved / (GIGA * self.bandwidth)) for item in work
        )


# NVIDIA's data sheets; the SXM form of data-centre GPUs.
GPUS = {
    "h200": Gpu("NVIDIA H200", 67, 494.7, 989.4, 141, 4800),
    "h100": Gpu("NVIDIA H100 80GB", 67, 494.7, 989.4, 80, 3350),
    "a100": Gpu("NVIDIA A100 80GB", 19.5, 156, 312, 80, 2039),
    "v100": Gpu("NVIDIA V100 16GB", 15.7, 15.7, 125, 16, 900, bf16=False),
    "l4": Gpu("NVIDIA L4", 30.3, 60, 121, 24, 300),
    "t4": Gpu("NVIDIA T4", 8.1, 8.1, 65, 16, 320, bf16=False),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 24, 1008),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 24, 936),
}


def gpu_named(name: str) -> Gpu:
    """Raises InputError for a GPU that is not known."""
    if name.lower() not in GPUS:
        raise InputError(
            f"--gpu {name} is not known; known are {', '.join(GPUS)}. For another give the one most like it with "
            "--gpu-memory, and --tflops or --seconds-per-step"
        )
    return GPUS[name.lower()]
