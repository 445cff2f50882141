"""What verl's fused functions and their tests compute: the whole logits in float64."""

import torch


def fused(hidden, weight, labels, temperature=1.0):
    """Return log-probability and entropy of each token, `[N]`."""
    states = hidden.reshape(-1, hidden.shape[-1]).double()
    return of_logits(states @ weight.double().T / temperature, labels)


def of_logits(logits, labels):
    logps = logits.double().reshape(-1, logits.shape[-1]).log_softmax(-1)
    entropy = -torch.where(logps.isinf(), 0.0, logps.exp() * logps).sum(-1)
    return logps.gather(-1, labels.reshape(-1, 1))[:, 0], entropy


def gradients(outputs, upstream, inputs):
    """Return the gradients of the inputs; an upstream gradient of None leaves out its output."""
    pairs = [
        (x, g.reshape(x.shape)) for x, g in zip(outputs, upstream, strict=True) if g is not None
    ]
    total = sum((x.double() * g).sum() for x, g in pairs)
    return torch.autograd.grad(total, inputs)


def fused_inputs(N, H, V, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.empty(1, N, H).uniform_(-0.5, 0.5).to(dtype).requires_grad_()
    weight = torch.empty(V, H).uniform_(-0.5, 0.5).to(dtype).requires_grad_()
    upstream = torch.empty(N).uniform_(-1, 1), torch.empty(N).uniform_(-0.5, 0.5)
    return hidden, weight, torch.randint(V, (1, N)), upstream
