"""What a reward model reads: a prompt, a completion and the end of both, as token ids."""

from typing import Any


def encode_scored(
    tokenizer: Any, prompts: list[str], completions: list[str], *, chat_template: bool = False
) -> list[list[int]]:
    """Tokenize prompts with their completions, as a policy would have sampled them.

    Prompt and completion are tokenized one by one and followed by the end token. Special tokens
    that are spelled out in a completion are text: a policy cannot end it that way. With
    ``chat_template`` both are messages, and the template writes the end.

    Args:
        tokenizer: The reward model's; it has an end token, or a chat template.
        prompts: The text of each prompt.
        completions: The text of each completion.
        chat_template: Whether to apply the tokenizer's chat template.

    Raises:
        ValueError: A text cannot be tokenized.
    """
    if not prompts:
        return []  # of which a tokenizer cannot make a batch
    try:
        if chat_template:
            texts = [
                tokenizer.apply_chat_template(_messages(prompt, completion), tokenize=False)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
        first = tokenizer(prompts)["input_ids"]
        second = tokenizer(completions, add_special_tokens=False, split_special_tokens=True)
    except Exception as error:  # the packages raise nothing narrower
        raise ValueError(f"a prompt or completion cannot be tokenized: {error}") from error
    end = [tokenizer.eos_token_id]
    return [[*p, *c, *end] for p, c in zip(first, second["input_ids"], strict=True)]


def _messages(prompt: str, completion: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
