"""What liger-kernel 0.8 computes for GRPO and its variants, transcribed in float64."""

import math
import types
import warnings

import torch

from tests.integrations.formulas import chosen, clipped, kl, logits_of, mean, sequence_mean

#: The losses without sequence-level ratios, and Liger's message about them.
NO_SEQUENCES = ("cispo", "sapo", "vespo")
LOWEST = math.log(1e-8)
SEQUENCES = "Sequence-level importance sampling is not supported for loss_type="


DEFAULTS = {
    "beta": 0.04,
    "use_ref_model": True,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "loss_type": "dapo",
    "max_completion_length": None,
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "temperature": 1.0,
    "delta": None,
    "use_bias_correction_kl": False,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


class Transcription:
    """Liger's `LigerFusedLinearGRPOLoss`, the whole batch at once."""

    def __init__(self, **options):
        self.o = types.SimpleNamespace(**{**DEFAULTS, **options})

    def __call__(
        self,
        _input,
        lin_weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
    ):
        o, mask, A = self.o, attention_mask.double(), advantages.double()[:, None]
        if o.importance_sampling_level == "sequence" and o.loss_type in NO_SEQUENCES:
            raise ValueError(f"{SEQUENCES} {o.loss_type}")
        if o.use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warnings.warn("two references were given. Using ref_per_token_logps", stacklevel=2)

        def logprobs(hidden, weight, bias):
            return chosen(logits_of(hidden, weight, bias) / o.temperature, selected_token_ids)

        lp = logprobs(_input, lin_weight, bias)
        ref = lp.detach()
        if o.use_ref_model and ref_per_token_logps is not None:
            ref = ref_per_token_logps.double()
        elif o.use_ref_model and ref_input is not None:
            ref = logprobs(ref_input, ref_weight, ref_bias).detach()
        log_ratio = lp - (lp.detach() if old_per_token_logps is None else old_per_token_logps)
        lengths = mask.sum(-1, keepdim=True)
        if o.importance_sampling_level == "sequence":
            log_ratio = sequence_mean(log_ratio, mask)
        r = log_ratio.exp()
        held = torch.zeros_like(r, dtype=torch.bool)
        if o.loss_type == "cispo":
            f = -r.clamp(max=o.epsilon_high).detach() * A * lp
            held = (r > o.epsilon_high) & (A > 0)
        elif o.loss_type == "sapo":
            tau = torch.where(A > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
            f = -4 / tau * torch.sigmoid(tau * (r - 1)) * A
        elif o.loss_type == "vespo":
            log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
            if vllm_is_ratio is not None:
                log_w += vllm_is_ratio.log().clamp(LOWEST, 20).sum(-1, keepdim=True)
            log_w = log_w.clamp(LOWEST, 20)
            k = torch.where(A >= 0, o.vespo_k_pos, o.vespo_k_neg)
            decay = torch.where(A >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
            f = -torch.exp(decay + k * log_w - decay * log_w.exp()) * A * lp
        else:
            free, bounded = clipped(r, A, o.epsilon_low, o.epsilon_high)
            held = bounded > free
            f = torch.maximum(free if o.delta is None else -A * r.clamp(max=o.delta), bounded)
        if vllm_is_ratio is not None and o.loss_type != "vespo":
            f = f * (vllm_is_ratio if vllm_is_ratio.dim() == 2 else vllm_is_ratio[:, None])
        metrics = []
        if o.beta:
            k = kl(lp - ref, "k3") * (r if o.use_bias_correction_kl else 1.0)
            f = f + o.beta * k
            metrics = [mean(k, mask)]
        f = f * mask
        metrics.append(mean(held.expand(mask.shape), mask))
        B = mask.shape[0]
        items = mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = {
            "grpo": lambda: (f.sum(-1, keepdim=True) / lengths.clamp(min=1)).sum() / B,
            "bnpo": lambda: f.sum() / mask.sum(),
            "dr_grpo": lambda: f.sum() / (B * o.max_completion_length),
            "dapo": lambda: f.sum() / items,
            "luspo": lambda: f.sum() / B,
        }
        total = loss[
            {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(o.loss_type, o.loss_type)
        ]()
        return total, tuple(metrics)


class Distillation:
    """Liger's `LigerFusedLinearJSDLoss`, the whole batch at once."""

    def __init__(
        self,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        compiled=True,
        chunk_size=1024,
        return_soft_hard_loss=False,
    ):
        self.weights, self.beta, self.ignored = (
            (weight_hard_loss, weight_soft_loss),
            beta,
            ignore_index,
        )
        self.temperature, self.all = temperature, return_soft_hard_loss

    def __call__(self, x, head, x_teacher, head_teacher, labels, bias=None, bias_teacher=None):
        counted = labels != self.ignored
        student = logits_of(x, head, bias)
        teacher = logits_of(x_teacher, head_teacher, bias_teacher)
        of_labels = chosen(student, labels.where(counted, 0))
        missing = len(head_teacher) - len(head)
        student = torch.nn.functional.pad(student / self.temperature, (0, missing))
        log_q, log_p = (
            student.log_softmax(-1),
            (teacher / self.temperature).log_softmax(-1).detach(),
        )
        q, p, b = log_q.exp(), log_p.exp(), self.beta
        if b in (0, 1):
            divergence = (p * (log_p - log_q) if b == 0 else q * (log_q - log_p)).sum(-1)
        else:
            log_m = ((1 - b) * q + b * p).log()
            divergence = (b * p * (log_p - log_m) + (1 - b) * q * (log_q - log_m)).sum(-1)
        count = counted.sum().clamp(min=1)
        soft, hard = (torch.where(counted, f, 0).sum() / count for f in (divergence, -of_labels))
        loss = self.weights[0] * hard + self.weights[1] * soft
        return (loss, soft, hard) if self.all else loss
