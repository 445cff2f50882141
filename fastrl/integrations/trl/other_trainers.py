"""Functions of fastrl for the trainers of TRL that `use_fastrl` does not take."""

from __future__ import annotations

_WITHOUT_LOGITS = (
    "without logits inside `fastrl.integrations.transformers.inside_forward` "
    "(docs/replace-the-loss/custom-loop.md)"
)
_OF_TOKENS = (
    "its loss needs log-probabilities of given tokens, which `fastrl.linear_token_logprobs` "
    f"computes {_WITHOUT_LOGITS}"
)
_OF_DISTRIBUTIONS = (
    "its loss compares distributions, which `fastrl.linear_policy_loss(..., advantages=None, "
    f"teacher=fastrl.Teacher.from_hidden(...))` does {_WITHOUT_LOGITS}"
)
_OF_SERVERS = (
    "its loss compares distributions with the tokens that a teacher's server returned, which "
    "`fastrl.linear_divergence(..., teacher=fastrl.Teacher.from_top_k(...))` does "
    f"{_WITHOUT_LOGITS}"
)
_OF_SCORES = "its loss is of one score for each sequence, without a vocabulary to save memory on"
_OF_POLICIES = f"`fastrl.linear_policy_loss` computes such a loss {_WITHOUT_LOGITS}"
_OF_ITS_OWN = (
    "if its loss is a policy loss, `fastrl.linear_policy_loss` computes it; if it needs "
    "log-probabilities of given tokens, `fastrl.linear_token_logprobs` does; both "
    f"{_WITHOUT_LOGITS}"
)
_OF_TRANSFORMERS = (
    "its `compute_loss` can call `fastrl.logits_policy_loss` "
    "(docs/replace-the-loss/transformers.md)"
)


def _of_sampled_tokens(option: str) -> str:
    return (
        f"with {option} its loss is a mean of -A log p over sampled tokens, which "
        '`fastrl.linear_policy_loss(..., objective="reinforce")` computes from advantages A '
        f"{_WITHOUT_LOGITS}; options that compare distributions are `fastrl.linear_divergence`"
    )


_SAMPLED = _of_sampled_tokens('distillation_mode="sampled_token"')
_TOKENS = ("SFT", "SSD", "DPO", "KTO", "CPO", "ORPO", "TPO", "A2PO", "OnlineDPO")
#: Trainers that `use_fastrl` takes, unless given as a class or a subclass with its own loss.
_TAKEN = frozenset(
    {
        *("GRPO", "RLOO", "AsyncGRPO"),
        *("SFT", "DPO", "KTO", "CPO", "ORPO", "TPO", "A2PO", "OnlineDPO"),
        *("Distillation", "GKD", "GOLD", "SDFT", "SDPO", "IWOPD"),
    }
)
#: Advice by the name of the class without `Trainer`.
_WAYS = {
    **dict.fromkeys(("GRPO", "RLOO"), _OF_POLICIES),
    **dict.fromkeys(_TOKENS, _OF_TOKENS),
    **dict.fromkeys(("Distillation", "GKD", "GOLD"), _OF_DISTRIBUTIONS),
    **dict.fromkeys(("AsyncDistillation", "ServerDistillation"), _OF_SERVERS),
    **dict.fromkeys(("SDFT", "SDPO"), _SAMPLED),
    "IWOPD": _of_sampled_tokens('distillation_objective="iw_opd"'),
    "Reward": _OF_SCORES,
    "AsyncGRPO": _OF_POLICIES,
    "_Base": _OF_ITS_OWN,  # any other trainer of TRL's
    "": _OF_TRANSFORMERS,
}


def way_on(trainer: object) -> str:
    """Return the function of fastrl that fits the loss of a trainer or a class of trainers."""
    kind = trainer if isinstance(trainer, type) else type(trainer)
    names = (
        base.__name__.removesuffix("Trainer")
        for base in kind.__mro__
        if base.__name__.endswith("Trainer")
    )
    name = next((name for name in names if name in _WAYS), "_Base")
    return "pass an instance" if kind is trainer and name in _TAKEN else _WAYS[name]
