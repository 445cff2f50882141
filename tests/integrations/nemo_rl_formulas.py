"""What NeMo RL computes, transcribed from its formulas in float64."""

import types

import torch

from tests.integrations.formulas import chosen, clipped, kl, logits_of


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    logits = logits_of(tensor_parallel_hidden_states, output_weight_layer).transpose(0, 1)
    return chosen(logits[:, :-1], target[:, 1:])


#: the defaults of the options of `ClippedPGLossFn` that are not off
OPTIONS = {"token_level_loss": True, "reference_policy_kl_type": "k3"}
OPTIONS |= {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2}


class Options(types.SimpleNamespace):
    def __getattr__(self, name):
        return None


def clipped_pg_loss(logprobs, data, sequences, tokens, **options):
    """Return the loss of `ClippedPGLossFn` for these options, KL within its clamps of 20 and 10."""
    o = Options(**{**OPTIONS, **options})
    token_mask, samples = data["token_mask"][:, 1:], data["sample_mask"]
    mask, A = token_mask * samples[:, None], data["advantages"][:, 1:]
    generation, lengths = data["generation_logprobs"][:, 1:], token_mask.sum(-1).clamp(min=1)
    old = logprobs.detach() if o.force_on_policy_ratio else data["prev_logprobs"][:, 1:]

    def reduced(x):
        if o.token_level_loss:
            return (x * mask).sum() / tokens
        return ((x * token_mask).sum(-1) / lengths * samples).sum() / sequences

    log_ratio = logprobs - old
    if o.sequence_level_importance_ratios:
        log_ratio = (log_ratio * token_mask).sum(-1, keepdim=True) / lengths[:, None]
        log_ratio = log_ratio.expand(A.shape)
    ratio = log_ratio.exp()
    free, bounded = clipped(ratio, A, o.ratio_clip_min, o.ratio_clip_max)
    if o.disable_ppo_ratio:
        f = -A * logprobs
    elif o.use_cispo:
        f = bounded.detach() * logprobs
    else:
        f = torch.maximum(free, bounded)
    if o.ratio_clip_c is not None:
        f = torch.where(A < 0, torch.minimum(f, -A * o.ratio_clip_c), f)
    if o.use_importance_sampling_correction:
        f = f * importance(old - generation, mask, lengths, o)
    loss = reduced(f)
    if o.reference_policy_kl_penalty:
        k = kl(logprobs - data["reference_policy_logprobs"][:, 1:], o.reference_policy_kl_type)
        start = generation if o.use_on_policy_kl_approximation else logprobs.detach()
        loss = loss + o.reference_policy_kl_penalty * reduced((logprobs - start).exp() * k)
    if o.positive_example_nll_weight:
        right = mask * (data["rewards"] > 0)[:, None]
        loss = loss - o.positive_example_nll_weight * (right * logprobs).sum() / right.sum()
    return loss


def importance(difference, mask, lengths, o):
    """Return the weights of the correction for the engine that sampled the tokens."""
    difference = difference.detach() * mask
    weights, low = difference.exp(), o.truncated_importance_sampling_ratio_min
    high, kind = o.truncated_importance_sampling_ratio, o.truncated_importance_sampling_type
    if o.sequence_level_importance_ratios:
        weights = difference.sum(-1, keepdim=True).exp().expand(mask.shape)
    if kind == "tis":
        return weights.clamp(low or 0.0, high)
    if kind == "icepop":
        return weights * (weights >= low) * (weights <= high)
    if kind == "seq-mask-tis":
        typical = (difference.sum(-1, keepdim=True) / lengths[:, None]).exp()
        return weights * (typical >= low) * (typical <= high)
    return weights
