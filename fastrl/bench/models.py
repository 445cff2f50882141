"""Width and vocabulary of models, by name."""

from typing import NamedTuple


class Model(NamedTuple):
    """The LM head of a model: ``hidden`` columns and ``vocabulary`` rows."""

    hidden: int
    vocabulary: int


MODELS = {
    "tiny": Model(16, 500),
    "smollm2-135m": Model(576, 49152),
    "gpt2": Model(768, 50257),
    "qwen2.5-0.5b": Model(896, 151936),
    "qwen3-0.6b": Model(1024, 151936),
    "gemma-3-1b": Model(1152, 262144),
    "llama-3.2-1b": Model(2048, 128256),
    "gpt-oss-20b": Model(2880, 201088),
    "mistral-7b": Model(4096, 32768),
    "qwen3-8b": Model(4096, 151936),
    "llama-3.1-8b": Model(4096, 128256),
    "deepseek-v3": Model(7168, 129280),
}
