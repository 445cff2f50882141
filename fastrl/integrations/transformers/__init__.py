"""The LM head and the last hidden states of a `transformers` causal language model.

    head = lm_head(model)
    hidden = last_hidden_states(model, input_ids=..., attention_mask=...)
    fastrl.linear_token_logprobs(hidden[:, :-1], token_ids=input_ids[:, 1:], **head.arguments())

If DDP, FSDP or DeepSpeed wraps or shards the model, do both in its forward: `inside_forward`.
"""

from fastrl.integrations.transformers.forward import inside_forward, last_hidden_states
from fastrl.integrations.transformers.head import LmHead, lm_head
from fastrl.integrations.transformers.wrappers import backbone

__all__ = ["LmHead", "backbone", "inside_forward", "last_hidden_states", "lm_head"]
