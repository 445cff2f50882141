"""The matrix of bench/gpu.py: operators on shapes of real models, with all installed peers.

Inputs are made on the device: normal logits with one raised target per row, never zeros (a GPU
computes faster on zeros). The shapes named `smoke` are tiny and run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from gpu_item import Item
from gpu_linear import Linear, linear_item, logprobs_item
from gpu_logits import WORK, Logits, logits_item
from gpu_tokens import LEVELS, gae_item, groups_item, tokens_item


class Shapes(NamedTuple):
    logits: list[Logits]
    linear: list[Linear]
    logprobs: list[tuple[Linear, bool]]  # scored without a gradient, or with
    tokens: list[tuple[int, int]]
    groups: list[tuple[int, int]]
    gae: list[tuple[int, int]]


FP32 = torch.float32
SHAPES = {
    "gpu": Shapes(  # the most telling first: the run stops at its deadline
        logits=[
            Logits(8192, 151936),
            Logits(8192, 128256),
            Logits(8192, 32768),
            Logits(4096, 50257),
            Logits(4096, 262144),
            Logits(256, 151936),
            Logits(64, 151936),
            Logits(8192, 151936, density=0.5),
            Logits(4096, 151936, FP32),
            Logits(4096, 151936),
            Logits(2048, 129280, sliced=True),
            Logits(4096, 151936, packed=True),
            Logits(32768, 32768),
        ],
        linear=[
            Linear(8192, 4096, 128256),
            Linear(8192, 896, 151936),
            Linear(8192, 4096, 128256, density=0.5),
            Linear(8192, 4096, 128256, trained=False),
            Linear(8192, 896, 151936, density=0.5),
            Linear(8192, 896, 151936, trained=False),
            Linear(2048, 2048, 151936),
        ],
        logprobs=[
            (Linear(8192, 4096, 128256), True),
            (Linear(8192, 4096, 128256), False),
            (Linear(8192, 896, 151936), True),
            (Linear(8192, 896, 151936), False),
        ],
        tokens=[(16, 4096), (64, 16384), (16, 640), (256, 40960)],
        groups=[(128, 8), (16, 4), (1024, 16), (256, 64)],
        gae=[
            (16, 131072),
            (8192, 2048),
            (4096, 128),
            (512, 4096),
            (16, 32768),
            (1, 1048576),
        ],
    ),
    "smoke": Shapes(
        logits=[
            Logits(6, 200, FP32, density=0.5, sliced=True),
            Logits(4, 129),
            Logits(128, 9, packed=True),
        ],
        linear=[Linear(6, 8, 130), Linear(16, 8, 130, trained=False, density=0.5)],
        logprobs=[(Linear(6, 8, 130), True), (Linear(6, 8, 130), False)],
        tokens=[(3, 40)],
        groups=[(4, 4)],
        gae=[(3, 40)],
    ),
}


def items(shapes: Shapes, device: torch.device) -> Iterator[Item]:
    """The matrix, one shape of each kind in turn, so that a deadline cuts no kind completely."""
    kinds = [
        *(
            [logits_item(device, shape, work) for shape in shapes.logits if work in shape.works()]
            for work in WORK
        ),
        [linear_item(device, shape) for shape in shapes.linear],
        [gae_item(device, *shape) for shape in shapes.gae],
        [logprobs_item(device, shape, scored=scored) for shape, scored in shapes.logprobs],
        [groups_item(device, *shape, by_id) for shape in shapes.groups for by_id in (False, True)],
        [tokens_item(device, *shape, level) for shape in shapes.tokens for level in LEVELS],
    ]
    for turn in range(max(map(len, kinds))):
        yield from (kind[turn] for kind in kinds if turn < len(kind))
