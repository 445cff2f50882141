"""Liger's fused losses on fastrl, with the same constructors and calls: GRPO, JSD, score centering.

from fastrl.integrations.liger import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss
"""

from fastrl.integrations.liger.distillation import (
    LigerFusedLinearJSDFunction,
    LigerFusedLinearJSDLoss,
)
from fastrl.integrations.liger.grpo import LigerFusedLinearGRPOLoss
from fastrl.integrations.liger.score_centering import (
    ISCorrection,
    LigerFusedLinearScoreCenteringLoss,
)

__all__ = [
    "ISCorrection",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDFunction",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearScoreCenteringLoss",
]
