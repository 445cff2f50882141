"""The LM head of a causal language model, in the form that the linear functions take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fastrl.integrations.transformers.linear import head_layers
from fastrl.integrations.transformers.transform import Transform, transform_of, vocabulary_of
from fastrl.integrations.transformers.wrappers import causal_model
from fastrl.ops.linear_token_stats import Lora

#: Most logits with a softcap that exist at once, for their mean.
_LOGITS = 2**24


class LmHead(NamedTuple):
    """An LM head: logits = softcap(logit_scale * (hidden weight^T + bias)).

    Attributes:
        weight: the LM head, `[V, H]`.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale) of a LoRA adapter on the head, or None.
        logit_scale: multiplies the logits.
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x, or None.

    Examples:
        >>> import torch, fastrl
        >>> from fastrl.integrations.transformers import LmHead
        >>> head = LmHead(torch.eye(2), None, None, logit_scale=2.0, logit_softcap=None)
        >>> fastrl.linear_token_logprobs(
        ...     torch.tensor([[1.0, 0.0]]), token_ids=torch.tensor([0]), **head.arguments()
        ... ).exp()
        tensor([0.8808])
    """

    weight: Tensor
    bias: Tensor | None
    lora: Lora | None
    logit_scale: float
    logit_softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """Return the head as keyword arguments of the linear functions."""
        return self._asdict()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` in float32, of products in the dtype of the weights."""
        states = hidden.to(self.weight.dtype)
        logits = linear(states, self.weight, self.bias).float()
        if self.lora is not None:
            a, b, scale = self.lora
            logits += scale * linear(linear(states.to(a.dtype), a), b).float()
        return Transform(self.logit_scale, self.logit_softcap)(logits)

    @torch.no_grad()
    def mean_logits(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the means `[B, T]` of logits over the vocabulary, in float32, without gradient.

        Without a softcap this is the logit of the mean row of the head. With one, the logits are
        computed once more, a chunk at a time.

        Args:
            hidden: last hidden states, `[B, T, H]`.
            mask: `[B, T]`; the result is 0 where it is false. None means all positions.
        """
        if self.logit_softcap is None:
            means = self._mean_without_softcap(hidden)
            return means if mask is None else means.masked_fill(~mask, 0.0)
        if mask is None:
            mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
        chunks = hidden[mask].split(max(1, _LOGITS // len(self.weight)))
        means = torch.cat([self.logits(chunk).mean(-1) for chunk in chunks])
        return means.new_zeros(mask.shape).masked_scatter(mask, means)

    def _mean_without_softcap(self, hidden: Tensor) -> Tensor:
        row = self.weight.mean(0, dtype=torch.float32)  # [H]
        if self.lora is not None:
            a, b, scale = self.lora
            row = row + scale * (b.mean(0, dtype=torch.float32)[:, None] * a).sum(0)
        with torch.autocast(hidden.device.type, enabled=False):
            means = hidden.float() @ row
        if self.bias is not None:
            means = means + self.bias.mean(dtype=torch.float32)
        return means * self.logit_scale


def lm_head(model: nn.Module) -> LmHead:
    """Return the LM head of a causal language model, with the model's scale and softcap.

    Scale and softcap are read from the model and its configuration. The first call for a model, and
    a call after they have changed, compares a few rows with the model's own logits; if the model is
    sharded, `inside_forward` makes the comparison. A model on the meta device is not compared. Rows
    that only pad the head (`unpadded_vocab_size`) are left out.

    LoRA on the head (PEFT) and a trainable copy of it (`modules_to_save`) are supported. The head
    is only read, never called, so its hooks do not fire.

    Args:
        model: a `transformers` causal language model, or a wrapper around one (PEFT, DDP, ...).
            A loss under DDP belongs inside the forward: see `inside_forward`.

    Returns:
        The head, which shares its tensors with the model.

    Raises:
        ValueError: the head is not an `nn.Linear`, its adapter is not plain LoRA, the model's
            logits differ from the logits of this head, or the first call for a model is compiled.

    Examples:
        >>> import transformers
        >>> from fastrl.integrations.transformers import lm_head
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> sizes |= {"vocab_size": 32, "num_attention_heads": 1, "pad_token_id": 0}
        >>> config = transformers.CohereConfig(**sizes, logit_scale=0.0625)
        >>> head = lm_head(transformers.AutoModelForCausalLM.from_config(config))
        >>> tuple(head.weight.shape), head.logit_scale
        ((32, 8), 0.0625)
    """
    causal = causal_model(model)
    head = head_layers(causal.get_output_embeddings()).parameters()  # type: ignore[operator]
    count, (weight, bias, lora) = vocabulary_of(causal), head
    if count is not None and count < len(weight):
        weight, bias = weight[:count], None if bias is None else bias[:count]
        lora = None if lora is None else (lora[0], lora[1][:count], lora[2])
    return LmHead(weight, bias, lora, *transform_of(model))
