"""What a reward model reads: a prompt, a completion and the end of both, as token ids."""

from typing import Any

from fastrl.train.data.messages import conversation


def encode_scored(
    tokenizer: Any,
    prompts: list[Any],
    completions: list[str],
    *,
    chat_template: bool = False,
    system_prompt: str | None = None,
) -> list[list[int]]:
    """Tokenize prompts with their completions, as a policy would have sampled them.

    Prompt and completion are tokenized one by one and followed by the end token. Special tokens
    that are spelled out in a completion are text: a policy cannot end it that way. A prompt that is
    messages, or any with ``chat_template``, goes through the tokenizer's chat template together
    with the completion; the template then writes the end.

    Args:
        tokenizer: The reward model's; it has an end token.
        prompts: Each a text or checked messages.
        completions: The text of each completion.
        chat_template: Whether prompts that are text become a message of the user.
        system_prompt: The system message of conversations that have none of their own.

    Raises:
        ValueError: A text cannot be tokenized, or there is no chat template.
    """
    chats = [chat_template or not isinstance(prompt, str) for prompt in prompts]
    if any(chats) and tokenizer.chat_template is None:
        raise ValueError("chat_template: the tokenizer of the reward model has none")
    try:
        if any(chats):
            return [
                _in_chat(tokenizer, prompt, completion, system_prompt)
                if chat
                else _in_text(tokenizer, [prompt], [completion])[0]
                for prompt, completion, chat in zip(prompts, completions, chats, strict=True)
            ]
        return _in_text(tokenizer, prompts, completions) if prompts else []
    except Exception as error:  # templates and the tokenizers package raise nothing narrower
        raise ValueError(f"a prompt or completion cannot be tokenized: {error}") from error


def _in_text(tokenizer: Any, prompts: list[str], completions: list[str]) -> list[list[int]]:
    first = tokenizer(prompts)["input_ids"]
    second = tokenizer(completions, add_special_tokens=False, split_special_tokens=True)
    end = [tokenizer.eos_token_id]
    return [[*p, *c, *end] for p, c in zip(first, second["input_ids"], strict=True)]


def _in_chat(tokenizer: Any, prompt: Any, completion: str, system_prompt: str | None) -> list[int]:
    messages = conversation(prompt, system_prompt)
    messages.append({"role": "assistant", "content": completion})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
