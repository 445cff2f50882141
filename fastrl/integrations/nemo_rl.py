"""NeMo RL's chunked linear log-probabilities on `linear_token_logprobs`.

    with fastrl.integrations.nemo_rl.use_fastrl():
        ...  # a policy with `policy.megatron_cfg.use_fused_linear_logprobs=true`

NeMo RL's policy workers are separate processes: make the call in each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import Replaced, named
from fastrl.ops._process_groups import gathered, size_of


def use_fastrl() -> Replaced:
    """Replace NeMo RL's `from_parallel_hidden_states_to_logprobs` in this process.

    With `use_fused_linear_logprobs`, the forward of Megatron's `GPTModel` calls the function for
    the loss and for old and reference log-probabilities.

    Results equal NeMo RL's except for rounding: fastrl sums logits and gradients of the head in
    float32, while NeMo RL rounds the logits, and each chunk of the head's gradient, to its dtype.

    Returns:
        A handle with `undo()` and `names`, which is also a context manager.

    Raises:
        ImportError: NeMo RL is not importable.
        NotImplementedError: the function of this NeMo RL is missing, has other parameters than in
            NeMo RL 0.7, or was already replaced; nothing is changed.
        RuntimeError: NeMo RL runs on fastrl already.

    Examples:
        >>> from fastrl.integrations.nemo_rl import use_fastrl
        >>> handle = use_fastrl()  # doctest: +SKIP
    """
    home = "nemo_rl.distributed.model_utils"
    return Replaced("nemo_rl", named(home, from_parallel_hidden_states_to_logprobs))


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the log-probability of each next token, `[B, S - 1]`, from hidden states and LM head.

    This is log softmax(h_t W^T)[target_{t+1}], which `linear_token_logprobs` computes without
    storing all logits. The gradient of the hidden states is summed over `tp_group` in float32; the
    gradient of the head covers only this rank's rows.

    Args:
        tensor_parallel_hidden_states: `[S / R, B, H]` on R ranks: Megatron's layout with sequence
            parallelism, positions in rank order.
        output_weight_layer: the LM head W, `[V, H]`, or this rank's rows of it.
        runtime_gather_output: ignored, as in NeMo RL.
        target: token ids of the whole vocabulary, `[B, S]`, the same on every rank. They are not
            shifted: this function shifts them.
        vocab_start_index: id of this rank's first row; its rows follow the rows of the previous
            rank.
        vocab_end_index: one past the id of this rank's last row.
        tp_group: the R ranks that share the head and the positions, or None.
        inference_only: True if no gradient is needed.
        cp_group: ranks that share sequences, at most one.
        chunk_size: ignored; fastrl chooses the chunks.

    Returns:
        Log-probabilities in nats, fp32 `[B, S - 1]`, the same on every rank, differentiable in
        hidden states and head.

    Raises:
        ValueError: shapes or vocabulary indices do not fit together, or `cp_group` has several
            ranks.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs
        >>> hidden, head = torch.zeros(3, 1, 2), torch.zeros(4, 2)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> from_parallel_hidden_states_to_logprobs(hidden, head, False, ids, 0, 4, None)
        tensor([[-1.3863, -1.3863]])
    """
    ranks = size_of(cp_group)
    if ranks > 1:
        raise ValueError(f"cp_group must have one rank, got {ranks}: each needs whole sequences")
    hidden, ids, ranks = tensor_parallel_hidden_states, target, size_of(tp_group)
    if hidden.dim() != 3 or ids.shape != (hidden.shape[1], hidden.shape[0] * ranks):
        raise ValueError(
            f"target must have shape [B, S] for hidden states [S / {ranks}, B, H] of each rank "
            f"(sequence parallelism), got {tuple(ids.shape)} for {tuple(hidden.shape)}"
        )
    _check_parts((vocab_start_index, vocab_end_index, len(output_weight_layer)), hidden, tp_group)
    batch, length = ids.shape
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        if ranks > 1:
            hidden = _Gathered.apply(hidden, tp_group)  # type: ignore[no-untyped-call]
        logprobs = fastrl.linear_token_logprobs(
            hidden[:-1].reshape(-1, hidden.shape[-1]),
            output_weight_layer,
            ids[:, 1:].T.reshape(-1),
            vocab_group=tp_group,
        )
    # a copy, since NeMo RL divides its result in place by the temperature
    return logprobs.reshape(length - 1, batch).T.contiguous()


class _Gathered(torch.autograd.Function):
    """The hidden states of all ranks, `[S, B, H]`.

    Their gradient must already be summed over the ranks, as `linear_token_logprobs` returns it.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(part, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.chunk(dist.get_world_size(ctx.group))
        return parts[dist.get_rank(ctx.group)].clone(), None


def _check_parts(part: tuple[int, int, int], like: Tensor, group: Any) -> None:
    """Raise on every rank unless start, end and rows of all ranks are parts in rank order."""
    # in every call: with a cache, a rank whose indices changed would wait for ranks that skip it
    parts = [part]
    if size_of(group) > 1:
        parts = gathered(torch.tensor(part, device=like.device), group).tolist()
    expected = 0
    for start, end, rows in parts:
        if start != expected or end != start + rows:
            raise ValueError(
                "vocab_start_index and vocab_end_index must be those of the head's rows, in rank "
                f"order, got {[(a, b) for a, b, _ in parts]} for {[c for *_, c in parts]} rows"
            )
        expected = end
