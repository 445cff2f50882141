"""Generate the package for Hugging Face `kernels`: `python bench/hub/generate.py OUT`.

The layout is that of `kernel-builder`: `build/<variant>/` for each backend, with its
`metadata.json`, `build/CARD.md` and `benchmarks/`. docs/hub.md says how to load and publish it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "fastrl"
#: What the package takes from fastrl; `native.py` has a version of its own.
MODULES = ("__init__", "backend", "checks", "contract", "fakes", "library", "segments", "tracing")
FOLDERS = ("objective", "ops", "reference", "triton")

NAME = "fastrl"
#: 0 is an alpha; see "Versioning" in the requirements of `kernels`.
VERSION = 0
LICENSE = "apache-2.0"
#: Variants by backend. Triton compiles on the machine, so every GPU from sm_80 on is supported.
BACKENDS = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0+PTX"]}}

#: Stands for the identifier, which is the name of the module and the namespace of its operators.
ID = "FASTRL_HUB_ID"
REWRITES = {
    # Ctrl-C during the imports of a command, of which the package has none
    r"^from fastrl import command_start .*\n": "",
    r"^NAMESPACES = .*$": f'NAMESPACES = {{"triton": "{ID}"}}',
    r"\btorch\.ops\.fastrl\.": f"torch.ops.{ID}.",
    r'"fastrl(?=::|\.)': f'"{ID}',
}


def rewritten(source: str, depth: int) -> str:
    """Return a module with relative imports; `depth`: how many folders it is below the package."""
    for pattern, replacement in REWRITES.items():
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    dots = "." * (depth + 1)
    return re.sub(
        r"^( *)from fastrl(?:\.([\w.]+))? import ",
        lambda found: f"{found[1]}from {dots}{found[2] or ''} import ",
        source,
        flags=re.MULTILINE,
    )


def sources() -> dict[str, str]:
    """Return the files of the package by their path in it, with `ID` for the identifier."""
    paths = [SOURCE / f"{name}.py" for name in MODULES]
    paths += [path for folder in FOLDERS for path in sorted((SOURCE / folder).rglob("*.py"))]
    names = {path.relative_to(SOURCE): path.read_text() for path in paths}
    texts = {str(name): rewritten(text, len(name.parts) - 1) for name, text in names.items()}
    licensed = {"LICENSE": (SOURCE.parent / "LICENSE").read_text()}
    return texts | licensed | {"native.py": (HERE / "native.py").read_text()}


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def metadata(identifier: str, backend: str, texts: dict[str, str]) -> str:
    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return json.dumps(
        {
            "name": NAME,
            "id": identifier,
            "version": VERSION,
            "license": LICENSE,
            "python-depends": [],
            "backend": BACKENDS[backend],
            "digest": {
                "algorithm": "sha256",
                "files": {name: digest(text) for name, text in sorted(texts.items())},
            },
        },
        indent=2,
    )


def generate(out: Path) -> None:
    """Write the package into a new or empty folder.

    Raises:
        ValueError: the folder holds files, or is one.
    """
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise ValueError(f"OUT must be a new or empty folder, but {out} is or holds files")
    texts = sources()
    # of all that is loaded, so that versions in one process never share a namespace
    version = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:10]
    for backend in BACKENDS:
        identifier = f"_{NAME}_{backend}_{version}"
        files = {name: text.replace(ID, identifier) for name, text in texts.items()}
        variant = out / "build" / f"torch-{backend}"
        write(variant, files | {"metadata.json": metadata(identifier, backend, files)})
    names = re.findall(r'^    "([a-zA-Z]\w*)",$', texts["__init__.py"], flags=re.MULTILINE)
    listed = "\n".join(f"- `{name}`" for name in names)
    card = (HERE / "CARD.md").read_text().replace("- NAMES", listed)
    write(out / "build", {"CARD.md": card.replace("VERSION", str(VERSION))})
    (out / "benchmarks").mkdir()
    shutil.copy(HERE / "benchmark.py", out / "benchmarks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    try:
        generate(parser.parse_args().out)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
