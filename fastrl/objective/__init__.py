"""`Objective`, its presets, and the weights and masks that it takes."""

from fastrl.objective.gamma_weights import GammaWeights as GammaWeights
from fastrl.objective.objective import Objective as Objective
from fastrl.objective.objective import TokenLoss as TokenLoss
from fastrl.objective.objective import as_objective as as_objective
from fastrl.objective.rollout_correction import RolloutCorrection as RolloutCorrection
from fastrl.objective.trust_region import TrustRegion as TrustRegion
