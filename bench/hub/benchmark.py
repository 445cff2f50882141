"""Benchmarks for `kernels benchmark`, each beside eager torch on the same tensors.

The head of Qwen3-0.6B in bfloat16; on a CPU, tensors that it can hold. The runner compares `out`
with an absolute tolerance of 0.01, which is above the rounding of bfloat16 at these magnitudes.
"""

import torch
from kernels.benchmark import Benchmark

#: Tokens, hidden size, vocabulary.
ON_GPU = 4096, 1024, 151_936
ON_CPU = 64, 64, 4096


class Rows:  # no Benchmark, or the runner would take it for one
    seed = 0

    def setup(self):
        self.tokens, self.width, vocabulary = ON_CPU if self.device == "cpu" else ON_GPU
        self.ids = torch.randint(vocabulary, (1, self.tokens), device=self.device)
        self.head = self.normal(0.2, vocabulary, self.width)

    def normal(self, std, *shape):
        values = std * torch.randn(shape, device=self.device)
        return values.bfloat16().requires_grad_()

    def eager_logprobs(self, logits):
        return logits.float().log_softmax(-1).gather(-1, self.ids[..., None])[..., 0]


class TokenLogprobs(Rows, Benchmark):
    """From logits [1, T, V]; the gradient is that of the sum."""

    def setup(self):
        super().setup()
        self.logits = self.normal(2.0, 1, self.tokens, self.head.shape[0])

    def benchmark_forward(self):
        self.out = self.kernel.token_logprobs(self.logits, self.ids)

    def verify_forward(self):
        return self.eager_logprobs(self.logits)

    def benchmark_forward_backward(self):
        logprobs = self.kernel.token_logprobs(self.logits, self.ids)
        (self.out,) = torch.autograd.grad(logprobs.sum(), self.logits)

    def verify_forward_backward(self):
        return torch.autograd.grad(self.eager_logprobs(self.logits).sum(), self.logits)[0]


class LinearPolicyLoss(Rows, Benchmark):
    """DAPO on policy from hidden states [1, T, H], summed over tokens; gradients of both."""

    def setup(self):
        super().setup()
        self.hidden = self.normal(5 * self.width**-0.5, 1, self.tokens, self.width)
        self.advantages = torch.randn(1, self.tokens, device=self.device).clamp(-1, 1)
        self.mask = torch.ones(1, self.tokens, device=self.device)

    def benchmark_forward_backward(self):
        loss = self.kernel.linear_policy_loss(
            self.hidden, self.head, self.ids, self.advantages, self.mask,
            objective="dapo", normalizer=1.0,
        ).loss  # fmt: skip
        self.out, _ = torch.autograd.grad(loss, (self.hidden, self.head))

    def verify_forward_backward(self):
        logprobs = self.eager_logprobs(self.hidden @ self.head.T)
        loss = -(self.advantages * (logprobs - logprobs.detach()).exp()).sum()
        return torch.autograd.grad(loss, (self.hidden, self.head))[0]
