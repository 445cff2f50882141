"""Named shapes of real models, in the selections that the benchmarks run."""

from typing import NamedTuple


class Logits(NamedTuple):
    name: str
    sequences: int
    tokens: int
    vocab: int


class Linear(NamedTuple):
    name: str
    sequences: int
    tokens: int
    hidden: int
    vocab: int


class Tokens(NamedTuple):
    name: str
    sequences: int
    tokens: int


class Groups(NamedTuple):
    name: str
    prompts: int
    size: int


LOGITS = {
    "smoke": [Logits("tiny", 2, 4, 1000)],
    "issue": [
        Logits("Qwen3", 4, 64, 151936),
        Logits("Mistral-7B", 8, 128, 32768),
    ],
    "models": [
        Logits("Llama-2", 8, 128, 32000),
        Logits("GPT-2", 4, 128, 50257),
        Logits("Llama-3", 4, 64, 128256),
        Logits("DeepSeek-V3", 4, 64, 129280),
        Logits("Qwen3", 4, 64, 151936),
        Logits("Qwen2.5-7B", 4, 64, 152064),
        Logits("Gemma-3", 2, 64, 262144),
    ],
}

LINEAR = {
    "smoke": [Linear("tiny", 2, 4, 16, 1000)],
    "issue": [Linear("small", 4, 256, 512, 32768), Linear("Qwen2.5-0.5B", 2, 256, 896, 151936)],
    "models": [Linear("Qwen3-0.6B", 4, 64, 1024, 151936), Linear("Mistral-7B", 4, 64, 4096, 32768)],
}

TOKENS = {
    "smoke": [Tokens("tiny", 4, 16)],
    "issue": [
        Tokens("micro-batch", 8, 128),
        Tokens("batch", 32, 1024),
        Tokens("rollout", 256, 4096),
    ],
    "models": [
        Tokens("wide", 4096, 128),
        Tokens("rollout", 256, 4096),
        Tokens("long", 16, 32768),
        Tokens("one", 1, 262144),
    ],
}

GROUPS = {
    "smoke": [Groups("tiny", 4, 4)],
    "issue": [Groups("batch", 1024, 8)],
    "models": [Groups("small", 16, 4), Groups("batch", 1024, 8), Groups("large", 1024, 64)],
}

SELECTIONS = tuple(LOGITS)
