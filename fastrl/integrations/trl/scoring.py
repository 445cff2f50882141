"""Scores of TRL's completions, computed in the model's forward from hidden states and LM head.

TRL calls its model with `fused_lm_head=True` and reads log-probabilities and entropies from the
output, which the forward computes without the logits. This module replaces that forward. TRL's own
code around it still splits a batch, passes on images and wraps the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead, backbone
from fastrl.integrations.transformers.forward import call_with_forward, inside_head
from fastrl.integrations.transformers.transform import prove
from fastrl.integrations.transformers.wrappers import causal_model, is_compiled, wrappers
from fastrl.integrations.trl.replay import kept_of
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.linear_token_stats import linear_token_stats


class Scores(NamedTuple):
    """The results for the completions of a batch.

    Attributes:
        loss: the loss of the batch, or None.
        logprobs: `[B, K]`, 0 where masked.
        entropy: `[B, K]`, or None.
    """

    loss: Tensor | None
    logprobs: Tensor
    entropy: Tensor | None


#: Inputs of a model whose second dimension is over tokens.
_SEQUENCES = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")

#: (hidden states `[B, K, H]` that predict the tokens, token ids `[B, K]`, head, kept) -> scores
Scorer = Callable[[Tensor, Tensor, LmHead, KeptTokens | None], Scores]


class ScoredModel:
    """A model that TRL calls for the scores of completions, with a forward that uses fastrl.

    Attributes:
        outputs: the result of each call, for all of TRL's batch or a part of it.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        count: int,
        scorer: Scorer,
        compiled: CompiledBackbones,
        sets: Sequence[KeptTokens] | None = None,
    ) -> None:
        """Score the last `count` = K tokens; `sets` has the kept tokens of each completion."""
        self.outputs: list[Any] = []
        self._trainer = trainer
        self._model = model
        self._causal = causal_model(model)
        self._count = count
        self._scorer = scorer
        self._compiled = compiled
        self._sets = sets  # of completions that are not scored yet

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, wrappers included, with `inputs` as TRL gives them."""
        if not inputs.get("fused_lm_head"):
            raise RuntimeError(
                "this version of TRL scores completions without `fused_lm_head=True`, whose "
                "forward use_fastrl replaces"
            )
        prove(self._model)
        self.outputs.append(call_with_forward(self._model, self._forward, **inputs))
        return self.outputs[-1]

    def _forward(
        self, *, labels: Tensor, fused_lm_head: bool, use_cache: bool = False, **inputs: Any
    ) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        compiled = any(is_compiled(wrapper) for wrapper in wrappers(self._model))
        run = self._compiled.backbone(self._causal, compiled=compiled)
        states, aux_loss = states_of(self._causal, run, **inputs)
        before = states.shape[1] - 1 - self._count
        hidden = states[:, before:-1]
        if is_head_float32(self._trainer):
            hidden = hidden.float()
        token_ids = labels[:, -self._count :]
        kept = self._next_kept(token_ids)
        scores = inside_head(
            self._causal, lambda states, head: self._scorer(states, token_ids, head, kept), hidden
        )
        mask = token_ids != -100
        loss = scores.loss
        if loss is None:  # a language-modeling loss for hooks: TRL does not use it
            loss = -scores.logprobs.sum() / mask.sum().clamp(min=1)
        entropy = scores.entropy
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=pad(scores.logprobs, (before, 0)),
            entropy=None if entropy is None else pad(entropy, (before, 0)),
            label_mask=pad(mask, (before, 0)),
            aux_loss=aux_loss,
        )

    def _next_kept(self, token_ids: Tensor) -> KeptTokens | None:
        """Return the sets of the next part of the batch, in the order in which TRL scores it."""
        if self._sets is None:
            return None
        count = len(token_ids)
        now, self._sets = self._sets[:count], self._sets[count:]
        return kept_of(now, token_ids)


def states_of(
    causal: nn.Module, run: Callable[..., Any], *arguments: Any, **inputs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the last hidden states, and the load-balancing loss of experts if requested.

    Args:
        causal: a causal language model, in whose forward this is called.
        run: its backbone, or a function that calls it.
        *arguments: arguments of the backbone.
        **inputs: keyword arguments of the backbone.
    """
    config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
    if getattr(config, "output_router_logits", False):
        inputs.setdefault("output_router_logits", True)
    inputs["use_cache"] = False
    outputs = run(*arguments, **inputs)
    aux_loss = None
    if inputs.get("output_router_logits"):
        aux_loss = _router_loss(config, outputs.router_logits, inputs.get("attention_mask"))
    return outputs.last_hidden_state, aux_loss


class CompiledBackbones:
    """The backbones of models that accelerate compiles; only the backbones are compiled.

    The rest of the forward consists of fastrl's operators, which a compiler cannot improve.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._of: dict[nn.Module, nn.Module] = {}

    def backbone(self, causal: nn.Module, *, compiled: bool) -> Callable[..., Any]:
        """Return a function that runs the backbone of a causal language model."""
        part = backbone(causal)
        return functools.partial(self.run, part) if compiled else part

    def run(self, part: nn.Module, *arguments: Any, **inputs: Any) -> Any:
        """Run a backbone, compiled with the trainer's options, for sequences of any length."""
        options = self._trainer.accelerator.state.dynamo_plugin.to_kwargs()
        if part not in self._of:
            self._of[part] = cast("nn.Module", torch.compile(part, **options))
        if options.get("dynamic") is not False:
            # a new length would compile a second time, and completions seldom have equal lengths
            for name in _SEQUENCES:
                if inputs.get(name) is not None:
                    torch._dynamo.maybe_mark_dynamic(inputs[name], 1)
        return self._of[part](*arguments, **inputs)


def _router_loss(config: Any, router_logits: Any, mask: Tensor | None) -> Tensor:
    """Return the load-balancing loss of a mixture of experts, as TRL computes it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    return torch.as_tensor(
        load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, mask)
    )


def token_scorer(
    trainer: Any, temperature: float, backend: Backend, *, with_entropy: bool
) -> Scorer:
    """Return a function that computes log-probabilities, and entropies if wanted."""
    wanted = ("logprobs", "entropy") if with_entropy else ("logprobs",)

    def scorer(hidden: Tensor, token_ids: Tensor, head: LmHead, kept: KeptTokens | None) -> Scores:
        with precision_of_head(trainer):
            stats = linear_token_stats(
                hidden,
                token_ids=token_ids,
                temperature=temperature,
                outputs=wanted,
                kept=kept,
                backend=backend,
                **head.arguments(),
            )
        logprobs, *entropy = (getattr(stats, name) for name in wanted)
        return Scores(None, logprobs, entropy[0] if entropy else None)

    return scorer


def precision_of_head(trainer: Any) -> AbstractContextManager[Any]:
    """Return the autocast under which a GPU multiplies the LM head."""
    if is_head_float32(trainer):
        return torch.autocast(trainer.accelerator.device.type, enabled=False)
    return cast("AbstractContextManager[Any]", trainer.accelerator.autocast())


def is_head_float32(trainer: Any) -> bool:
    """Return whether the LM head multiplies in float32."""
    return bool(getattr(trainer.args, "cast_lm_head_to_fp32", False))
