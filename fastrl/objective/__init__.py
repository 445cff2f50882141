"""`Objective`, its presets, and the rollout correction."""

from fastrl.objective.objective import Objective as Objective
from fastrl.objective.objective import TokenLoss as TokenLoss
from fastrl.objective.objective import as_objective as as_objective
from fastrl.objective.rollout_correction import RolloutCorrection as RolloutCorrection
