"""The loss family: `Objective`, the named losses, and the correction for the sampling engine."""

from fastrl.objective.objective import AGGREGATIONS as AGGREGATIONS
from fastrl.objective.objective import KL_ESTIMATORS as KL_ESTIMATORS
from fastrl.objective.objective import KL_GRADIENTS as KL_GRADIENTS
from fastrl.objective.objective import LEVELS as LEVELS
from fastrl.objective.objective import RATIOS as RATIOS
from fastrl.objective.objective import Aggregation as Aggregation
from fastrl.objective.objective import KlEstimator as KlEstimator
from fastrl.objective.objective import KlGradient as KlGradient
from fastrl.objective.objective import Objective as Objective
from fastrl.objective.objective import Ratio as Ratio
from fastrl.objective.objective import TokenLoss as TokenLoss
from fastrl.objective.objective import as_objective as as_objective
from fastrl.objective.rollout_correction import RolloutCorrection as RolloutCorrection
