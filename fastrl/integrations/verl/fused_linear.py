"""verl's log-probabilities and entropies without logits (`use_fused_kernels=True`) on fastrl.

The patched forward of verl's models calls these with hidden states and the LM head:
`FusedLinearForPPO` for the kernels `torch` and `liger`, `linear_cross_entropy` for `triton` and
for Megatron, where each rank has a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import Replacement

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sum": torch.sum,
    "mean": torch.mean,
}
_BACKENDS = ("torch", "liger")


class FusedLinearForPPO(torch.nn.Module):
    """`linear_token_stats` with the arguments of verl's module.

    Both options are accepted and ignored: fastrl chooses the chunks by their memory. `use_fastrl`
    replaces verl's `forward` with this one, so verl's own instances use it, too. An id of -100
    gives 0, where verl raises an error.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.fused_linear import FusedLinearForPPO
        >>> hidden, weight, ids = torch.ones(1, 3, 2), torch.zeros(4, 2), torch.tensor([[0, 1, 3]])
        >>> FusedLinearForPPO()(hidden, weight, ids, temperature=0.7)[0]
        tensor([[-1.3863, -1.3863, -1.3863]])
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in _BACKENDS:
            raise ValueError(
                f"impl_backend must be one of {', '.join(_BACKENDS)}, got {impl_backend!r}"
            )
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return log softmax(h W^T / temperature)[id] and the entropy, fp32 like `input_ids`.

        Hidden states are `[B, T, H]` or `[N, H]`, the head `[V, H]`; both outputs have gradients.
        """
        stats = fastrl.linear_token_stats(
            hidden_states, vocab_weights, input_ids, temperature=_scalar(temperature)
        )
        assert stats.logprobs is not None
        assert stats.entropy is not None
        return stats.logprobs, stats.entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(h W^T / temperature)[label] and the entropy, fp32 `[N]`, of all tokens.

    Hidden states `[..., H]` and labels are flattened, for example Megatron's `[T, 1, H]` and
    `[1, T]`.

    Args:
        hidden: last hidden states, of N tokens in all.
        weight: the LM head `[V, H]`, or this rank's part of it, in rank order.
        labels: N token ids of the whole vocabulary.
        temperature: divides the logits.
        reduction: `none`, or `sum` or `mean` of the log-probabilities (a scalar).
        dist_process_group: the ranks that have the parts of the vocabulary, or None. The gradient
            of the hidden states is this rank's part of the sum over the group, as in verl:
            Megatron adds the parts where it gathers the hidden states, which it does only with
            `sequence_parallel=True`; otherwise they stay parts.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.fused_linear import linear_cross_entropy
        >>> linear_cross_entropy(torch.ones(3, 1, 2), torch.zeros(4, 2), torch.tensor([[0, 1, 3]]))
        (tensor([-1.3863, -1.3863, -1.3863]), tensor([1.3863, 1.3863, 1.3863]))
    """
    if not isinstance(reduction, str):
        raise TypeError(f"reduction must be a str, got {type(reduction).__name__}")
    reduce = _REDUCTIONS.get(reduction.lower())
    if reduce is None:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    stats = fastrl.linear_token_stats(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=_scalar(temperature),
        vocab_group=dist_process_group,
        reduce_hidden_gradient=dist_process_group is None,
    )
    assert stats.logprobs is not None
    assert stats.entropy is not None
    return reduce(stats.logprobs), stats.entropy


def _scalar(temperature: float | Tensor) -> float | Tensor:
    """Return a one-element temperature as a 0-d tensor; verl broadcasts any such tensor."""
    single = isinstance(temperature, Tensor) and temperature.numel() == 1
    return temperature.reshape(()) if single else temperature  # type: ignore[union-attr]


#: verl imports the two modules, and with them Liger or Triton, when a model's forward first runs.
REPLACEMENTS = (
    Replacement(
        "verl.utils.experimental.torch_functional",
        "FusedLinearForPPO.forward",
        FusedLinearForPPO.forward,
        optional=True,
        when_imported=True,
    ),
    Replacement(
        "verl.utils.kernel.linear_cross_entropy",
        "linear_cross_entropy",
        linear_cross_entropy,
        optional=True,
        when_imported=True,
    ),
)
