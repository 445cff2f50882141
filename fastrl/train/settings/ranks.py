"""The settings of a run on several ranks."""

from dataclasses import dataclass
from typing import Literal

from fastrl.train.settings.options import option


@dataclass
class RankSettings:
    """How several processes, started by torchrun, share the work."""

    parallel: Literal["ddp", "fsdp"] = option(
        "ddp",
        "With several ranks: ddp: each has all weights; fsdp: weights, gradients and the "
        "optimizer's state are sharded over them (FSDP2).",
        result=False,
    )
    rank_timeout: float = option(
        1800.0,
        "Seconds that a rank waits for the others, such as for a slow reward function.",
        above=0,
        result=False,
    )
