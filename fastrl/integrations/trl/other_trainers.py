"""What fastrl has for the trainers of TRL that `use_fastrl` does not take."""

from __future__ import annotations

_OF_TOKENS = (
    "its loss needs log-probabilities of given tokens, which `fastrl.linear_token_logprobs` "
    "computes without logits inside `fastrl.integrations.transformers.inside_forward`"
)
_OF_DISTRIBUTIONS = (
    "its loss compares whole distributions, for which fastrl has no function; from sampled tokens "
    "`fastrl.linear_token_logprobs` and `fastrl.kl_divergence` estimate the divergence"
)
_OF_SCORES = "its loss is of one score for each sequence, without a vocabulary to save memory on"
_OF_POLICIES = (
    "`fastrl.linear_policy_loss` computes such a loss without logits inside "
    "`fastrl.integrations.transformers.inside_forward`"
)

_WAYS = {
    **dict.fromkeys(("SFT", "DPO", "KTO", "CPO", "ORPO", "TPO", "A2PO", "OnlineDPO"), _OF_TOKENS),
    **dict.fromkeys(("Distillation", "AsyncDistillation", "GKD", "GOLD"), _OF_DISTRIBUTIONS),
    **dict.fromkeys(("SDFT", "SDPO", "IWOPD"), _OF_DISTRIBUTIONS),
    "Reward": _OF_SCORES,
    "AsyncGRPO": _OF_POLICIES,
}


def way_on(trainer: object) -> str:
    """Return which function of fastrl fits what a trainer computes."""
    if isinstance(trainer, type):
        return "pass an instance"
    names = (kind.__name__.removesuffix("Trainer") for kind in type(trainer).__mro__)
    return next(
        (_WAYS[name] for name in names if name in _WAYS), f"in a loop of your own, {_OF_POLICIES}"
    )
