"""How far the log-probabilities of a sampler and a trainer differ, by the dtype of their LM heads.

    python bench/studies/head_precision.py runs/smollm2 [--prompts 24 --tokens 64 --seed 0]

The weights are bfloat16. The sampler is `generate` of transformers, which computes one token at a
time from a cache; the trainer computes whole sequences. A bfloat16 head rounds its logits to
bfloat16, as those of transformers and TRL do. A float32 head keeps float32 sums of the same
products: fastrl's, or one with both operands cast (TRL's `cast_lm_head_to_fp32`, vLLM's
`head_dtype`). The layers below the head compute in bfloat16 or, to see the head alone, in float32.

Prints a Markdown table with standard errors over completions, and how far two ways to compute the
same head differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import linear_token_logprobs
from fastrl.integrations.transformers import backbone

THINGS = "a river,the number seven,an old bridge,bread,the moon,a lost key,winter,prime numbers"
TASKS = ("Write a short story about {}.", "Explain {} to a child.", "What is {}?")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HALF = torch.bfloat16


class Sample(NamedTuple):
    """Completions ``[B, T]``, which of their tokens count, and the sampler's log-probabilities."""

    token_ids: Tensor
    mask: Tensor
    logprobs: Tensor


def logits_of(states: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of bfloat16 operands, multiplied and stored in ``dtype``."""
    return linear(states.to(HALF).to(dtype), weight.to(HALF).to(dtype))


def logprobs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return log-probabilities, computed in float32 from logits of any dtype."""
    return logits.float().log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def sampled(model: Any, inputs: Any, head: torch.dtype, tokens: int, seed: int) -> Sample:
    """Sample completions at temperature 1, with the model's head in ``head``."""
    torch.manual_seed(seed)
    weight = model.lm_head.weight
    model.lm_head.forward = lambda states: logits_of(states, weight, head)
    out = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    del model.lm_head.forward
    token_ids = out.sequences[:, inputs.input_ids.shape[1] :]
    ended = (token_ids == model.generation_config.eos_token_id).long()
    mask = ended.cumsum(1) - ended == 0  # with the token that ends a completion
    return Sample(token_ids, mask, logprobs_of(torch.stack(out.logits, 1), token_ids))


def trained(model: Any, inputs: Any, token_ids: Tensor) -> dict[str, Tensor]:
    """Return log-probabilities ``[B, T]`` from one forward of whole sequences, by head."""
    attention = torch.cat([inputs.attention_mask, torch.ones_like(token_ids)], 1)
    states = backbone(model)(
        input_ids=torch.cat([inputs.input_ids, token_ids], 1),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state[:, -1 - token_ids.shape[1] : -1]
    states, weight = states.to(HALF), model.lm_head.weight.to(HALF)
    found = {
        name: logprobs_of(logits_of(states, weight, dtype), token_ids)
        for name, dtype in DTYPES.items()
    }
    found["fastrl"] = linear_token_logprobs(states, weight, token_ids)
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError:
        return found
    rows = (states.flatten(0, 1), weight, None, token_ids.flatten())
    found["TRL"] = ChunkedLogProbFunction.apply(*rows, 1.0, 32768, None, 1.0, ("log_probs",))[0]
    found["TRL"] = found["TRL"].view_as(token_ids)
    return found


def numbers(difference: Tensor, mask: Tensor) -> str:
    """Return the columns of the table for trainer minus sampler, ``[B, T]``."""
    columns = []
    for size in (difference.abs(), difference.expm1().abs()):
        of_rows = (size * mask).sum(1) / mask.sum(1)
        error = of_rows.std() / len(of_rows) ** 0.5
        columns.append(f"{size[mask].mean():.4f} ± {error:.4f}")
    columns.insert(1, f"{difference[mask].abs().quantile(0.99):.3f}")
    return " | ".join(columns)


@torch.no_grad()
def main() -> None:
    """Sample with both heads above both backbones, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a causal LM with a chat template")
    parser.add_argument("--prompts", type=int, default=24, help="chats, each sampled once")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    texts = [task.format(thing) for thing in THINGS.split(",") for task in TASKS]
    chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(options.prompts)]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    print("| layers | sampler's head | trainer's head | mean | 99 % | mean of \\|ratio - 1\\| |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=HALF).eval()
    count, same = 0, dict.fromkeys((("fastrl", "float32"), ("TRL", "bfloat16")), 0.0)
    for layers, dtype in DTYPES.items():
        model.to(dtype)
        for sampler, head in DTYPES.items():
            sample = sampled(model, inputs, head, options.tokens, options.seed)
            found = trained(model, inputs, sample.token_ids)
            count += int(sample.mask.sum())
            for trainer in DTYPES:
                columns = numbers(found[trainer] - sample.logprobs, sample.mask)
                print(f"| {layers} | {sampler} | {trainer} | {columns} |", flush=True)
            for one, other in same:
                if one in found:
                    largest = float((found[one] - found[other]).abs().max())
                    same[one, other] = max(same[one, other], largest)
    print(f"\n{count} tokens in four samples. The trainer's heads that should be equal differ by:")
    print(*(f"- {one} and {other}: {size:.1g}" for (one, other), size in same.items()), sep="\n")


if __name__ == "__main__":
    main()
