"""Prompts that are conversations: checked, rendered by a chat template, shown as text."""

from typing import Any

ROLES = ("system", "user", "assistant")


def check_messages(messages: Any, where: str) -> None:
    """Check a conversation that a completion continues.

    Args:
        messages: What should be messages ``{"role": ..., "content": ...}``: perhaps a system
            message, then those of user and assistant, the last one of the user.
        where: What the message of an error begins with.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: must be text or a list of messages, got {messages!r}")
    for i, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {i}")
        if message["role"] == "system" and i > 1:
            raise ValueError(f"{where}: message {i}: only the first may be of the system")
    if messages[-1]["role"] != "user":
        raise ValueError(
            f"{where}: the last message must be of the user, got role {messages[-1]['role']!r}"
        )


def prompt_text(record: dict[str, Any]) -> str:
    """The prompt as text; of a conversation, the last message of the user."""
    prompt = record["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def conversation(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    """The messages of a prompt: a text is a message of the user.

    Args:
        prompt: A text, or checked messages.
        system_prompt: The system message of prompts that have none of their own.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{key: message[key] for key in ("role", "content")} for message in messages]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def render(prompt: Any, tokenizer: Any, system_prompt: str | None) -> str:
    """The text that the model continues, by the chat template.

    Args:
        prompt: A text, which is a message of the user, or checked messages.
        tokenizer: Has the chat template.
        system_prompt: The system message of prompts that have none of their own.

    Raises:
        ValueError: The template refuses the messages.
    """
    messages = conversation(prompt, system_prompt)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's authors
        raise ValueError(
            f"chat_template: the tokenizer's template raised {type(error).__name__}: {error}, for "
            f"messages of {[message['role'] for message in messages]}, the last "
            f"{messages[-1]['content'][:80]!r}"
        ) from error
    return str(text)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: must be an object, got {type(message).__name__}")  # noqa: TRY004
    if message.get("role") not in ROLES:
        raise ValueError(
            f'{where}: "role" must be one of {", ".join(ROLES)}, got {message.get("role")!r}'
        )
    if not isinstance(message.get("content"), str) or not message["content"]:
        raise ValueError(
            f'{where}: "content" must be a non-empty string, got {message.get("content")!r}'
        )
    # A column of a data set has all keys in all rows; what the template does not get must be empty.
    other = [key for key, value in message.items() if key not in ("role", "content") and value]
    if other:
        raise ValueError(f"{where}: must have role and content alone, got also {other}")
