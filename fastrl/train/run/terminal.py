"""Text of unknown origin, such as a completion, made safe for a terminal and for one line."""


def printable(text: str, keep: str = "") -> str:
    r"""The text with every character that is not printed as Python's escape of it.

    Escaped are control characters (C0, C1, among them escape sequences and line breaks), overrides
    of the writing direction and other invisible marks, and lone surrogates. A backslash remains as
    it is, so that text may be escaped twice.

    Args:
        text: Any text.
        keep: Characters that remain, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shortened(text: str, length: int) -> str:
    """At most ``length`` characters: the beginning and the end, where answers are."""
    if len(text) <= length:
        return text
    end = (length - 3) // 2
    return f"{text[: length - 3 - end]}...{text[len(text) - end :]}"
