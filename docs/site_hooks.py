"""What `mkdocs build` does to the pages, beyond its extensions."""

import html
import os
import re
from pathlib import Path
from xml.etree.ElementTree import tostring

import ziamath
from mkdocs.structure.files import File

ziamath.config.precision = 2

ROOT = Path(__file__).parents[1]
#: Documents outside docs/ that are pages, too.
OUTSIDE = {"bench/README.md": "bench.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]+)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)"\s+src="(?P<light>[^"]+)">\s*</picture>'
)
FORMULA = re.compile(
    r'<(?P<kind>span|div) class="arithmatex">\\[(\[](?P<formula>.*?)\\[)\]]</(?P=kind)>', re.DOTALL
)


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, **_):
    source = Path(page.file.abs_src_path)

    def on_the_site(link):
        """A file without a page is named, and not linked; a missing one is left to `strict`."""
        target = Path(os.path.normpath(source.parent / link["path"]))
        inside = target.is_relative_to(ROOT / "docs")
        if not target.is_file() or (inside and source.is_relative_to(ROOT / "docs")):
            return link[0]
        place = target.relative_to(ROOT / "docs" if inside else ROOT).as_posix()
        if not inside and place not in OUTSIDE:
            return link["label"]
        place = os.path.relpath(OUTSIDE.get(place, place), Path(page.file.src_uri).parent)
        return f"[{link['label']}]({place}{link['anchor'] or ''})"

    def by_palette(picture):
        """A picture element follows the reader's system; the site has a switch."""
        alt = " ".join(picture["alt"].split())
        return "\n".join(f"![{alt}]({picture[one]}#only-{one})" for one in ("light", "dark"))

    return PICTURE.sub(by_palette, LINK.sub(on_the_site, markdown))


def on_page_content(content, **_):
    """Formulas are SVG in the size and colour of the text: no script, the same in every browser."""

    def em(pixels):
        return f"{pixels / 16:.3f}em"

    def typeset(found):
        formula = html.unescape(found["formula"]).strip()
        inline = found["kind"] == "span"
        drawn = ziamath.Latex(formula, size=17, color="currentColor", inline=inline).svgxml()
        box = [float(number) for number in drawn.get("viewBox").split()]
        drawn.set("width", em(box[2]))
        drawn.set("height", em(box[3]))
        if inline:
            drawn.set("style", f"vertical-align: {em(-box[1] - box[3])}")
        drawn.set("role", "img")
        drawn.set("aria-label", formula)
        return f'<{found["kind"]} class="formula">{tostring(drawn, "unicode")}</{found["kind"]}>'

    return FORMULA.sub(typeset, content)
