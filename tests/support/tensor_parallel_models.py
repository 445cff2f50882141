"""A small model of transformers, whole and split over the ranks of tensor parallelism."""

import os

import torch
import torch.distributed as dist
import transformers

import fastrl
from fastrl.integrations.transformers import inside_forward


def save(path, vocabulary, *, tied):
    """Store a small model with random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, tie_word_embeddings=tied, **sizes, **heads
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def compared_on_ranks(path):
    """The largest difference of log-probabilities and, relative to their sizes, of gradients."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(path, dtype=torch.float32)
    split = load(path, dtype=torch.float32, tp_plan="auto")
    assert type(split.get_output_embeddings().weight).__name__ == "DTensor"
    ids = torch.randint(whole.config.vocab_size, (3, 9))

    def logprobs(hidden, head):
        return fastrl.linear_token_logprobs(
            hidden[:, :-1], token_ids=ids[:, 1:], **head.arguments()
        )

    found = inside_forward(split, logprobs, input_ids=ids)
    expected = fastrl.token_logprobs(whole(ids).logits[:, :-1].contiguous(), ids[:, 1:])
    errors = [(found - expected).abs().amax()]
    found.sum().backward()
    expected.sum().backward()
    gradients = dict(split.named_parameters())
    for name, x in whole.named_parameters():
        grad = gradients[name].grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append((grad - x.grad).abs().amax() / x.grad.abs().amax())
    return float(torch.stack(errors).amax())
