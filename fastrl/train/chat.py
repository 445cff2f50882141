"""The chat template: text prompts as messages, a system message, and what the template begins."""

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

_SAID = "7-4-1"  # by the assistant, where its messages are looked for
_PYTHON = {"True": True, "False": False, "None": None}  # as JSON's true, false and null


def chat_arguments(settings: Sequence[str]) -> dict[str, Any]:
    """Return the values in ``NAME=VALUE``: JSON if they can be read as such, otherwise text.

    Raises:
        ValueError: A setting has no name, or a name is given twice.

    Examples:
        >>> from fastrl.train.chat import chat_arguments
        >>> chat_arguments(["system=Be brief.", "enable_thinking=false"])
        {'system': 'Be brief.', 'enable_thinking': False}
    """
    arguments: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier() or name in arguments:
            raise ValueError(
                "chat_template must be followed by different NAME=VALUE, such as "
                f"enable_thinking=false or system='You are ...', got {setting!r}"
            )
        arguments[name] = _PYTHON.get(value, value)
        if name != "system" and value not in _PYTHON:
            try:
                arguments[name] = json.loads(value)
            except ValueError:
                continue
    return arguments


class Chat:
    """A tokenizer's chat template with the arguments and the system message of the settings.

    Raises:
        ValueError: There is no template, or it does not read an argument, or what it reads is set
            by the loops.
    """

    def __init__(self, tokenizer: Any, settings: Sequence[str] | None) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("chat_template: the tokenizer has no chat template")
        self._tokenizer, self._arguments = tokenizer, chat_arguments(settings or ())
        system = self._arguments.pop("system", None)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        read = _variables(tokenizer.get_chat_template()) - {"raise_exception", "strftime_now"}
        own = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        for name in self._arguments:
            if name in own - {"tools", "documents"}:
                raise ValueError(f"chat_template: the argument {name!r} is set by the loops")
            if name not in read:
                others = sorted(name for name in read - own if not name.endswith("_token"))
                raise ValueError(
                    f"chat_template: the model's template does not read the argument {name!r}, "
                    f"only {', '.join(others) or 'messages'}"
                )
        self.prefill, self.turn_end = self._prefill(), self._turn_end()

    def render(self, prompt: str | list[dict[str, Any]], *, generate: bool = True) -> str:
        """Return a text prompt or a conversation as text, up to the assistant's answer.

        A system message is put before prompts that have none.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] not in ("system", "developer"):
            messages = [*self._system, *messages]
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **self._arguments
            )
        )

    def _written(self, *messages: tuple[str, str], generate: bool = False) -> str:
        """Return a conversation as text, or nothing from a template that refuses it."""
        said = [{"role": role, "content": text} for role, text in messages]
        try:
            return self.render(said, generate=generate)
        except Exception:  # templates are programs
            return ""

    def _turn_end(self) -> str:
        """Return what the template writes behind an answer, such as ``<|im_end|>``."""
        return self._written(("user", _SAID), ("assistant", _SAID)).rpartition(_SAID)[2]

    def _prefill(self) -> str:
        """Return what the template writes behind the header of the answer, such as ``<think>``.

        A message of the assistant in the middle of a conversation has the header alone.
        """
        asked = ("user", "?")
        begun = self._written(asked, generate=True)
        header, found, _ = self._written(asked, ("assistant", _SAID), asked).partition(_SAID)
        return begun[len(header) :] if found and begun.startswith(header) else ""


def _variables(template: str) -> set[str]:
    """Return the names that a template reads."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat_template: the tokenizer's template is invalid: {error}") from error
