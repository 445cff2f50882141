"""The blocks of code in the documents, and the code within their sentences."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
FENCE = re.compile(r'^ *```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Code with a title is an excerpt of the file that it names."""

    page: str
    language: str
    title: str
    code: str

    def __str__(self):
        return f"{self.page}: {self.code.strip().splitlines()[-1][:40]}"

    def change(self):
        """Return the code before and after a diff; what is no diff has no before."""
        if self.language != "diff":
            return None, self.code
        lines = self.code.splitlines()
        return tuple("\n".join(x[1:] for x in lines if x[:1] != left) for left in "+-")


TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}
BLOCKS = [Block(page, *found) for page, text in TEXTS.items() for found in FENCE.findall(text)]
INLINE = [
    Block(page, "inline", "", " ".join(code.split()))
    for page, text in TEXTS.items()
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))
]


def changes(page):
    """Return (before, after) of the Python code of a page."""
    return [b.change() for b in BLOCKS if b.page == page and b.language in ("python", "diff")]


def script(name):
    """Return the only Python code of a page."""
    ((_, code),) = changes(name)
    return code
