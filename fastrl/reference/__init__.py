"""The reference backend: the definition of every op in eager torch, on any device."""

from fastrl.reference.divergence import divergence as divergence
from fastrl.reference.divergence import divergence_gradient as divergence_gradient
from fastrl.reference.divergence import divergence_terms as divergence_terms
from fastrl.reference.gae import gae as gae
from fastrl.reference.gamma_weights import gamma_weights as gamma_weights
from fastrl.reference.group_advantages import group_advantages as group_advantages
from fastrl.reference.inner_graph import inner_graph as inner_graph
from fastrl.reference.kept_tokens import kept_logits as kept_logits
from fastrl.reference.objectives import kl_estimate as kl_estimate
from fastrl.reference.policy_loss import policy_loss as policy_loss
from fastrl.reference.rollout_correction import rollout_correction as rollout_correction
from fastrl.reference.sequences import Sequences as Sequences
from fastrl.reference.sequences import sequences_of as sequences_of
from fastrl.reference.token_masks import off_policy as off_policy
from fastrl.reference.token_masks import outside_trust_region as outside_trust_region
from fastrl.reference.token_masks import top_entropy as top_entropy
from fastrl.reference.token_stats import token_stats as token_stats
from fastrl.reference.token_weights import local_count as local_count
from fastrl.reference.token_weights import sequence_weights as sequence_weights
from fastrl.reference.token_weights import token_weights as token_weights
from fastrl.reference.value_loss import value_loss as value_loss
from fastrl.reference.vocabulary_parts import PartStats as PartStats
from fastrl.reference.vocabulary_parts import part_gradient as part_gradient
from fastrl.reference.vocabulary_parts import part_stats as part_stats
from fastrl.reference.vocabulary_parts import whole_stats as whole_stats
