"""`make docs` builds a site without a warning, of all public names, that fetches nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrl
from tests.integrations.packages import needed

needed("mkdocs")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def fetched(page):
    """What a browser follows by itself."""
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page)
    place = re.compile(r"""\b(?:src|href)=["']?([^"'\s>]*)""")
    return [link for tag in tags if "canonical" not in tag for link in place.findall(tag)]


def build(folder, *options):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.html")
    }


def test_every_public_name_has_an_entry(site):
    pages = " ".join(text for name, text in site.items() if name.startswith("api/"))
    anchors = set(re.findall(r'\bid="([^"]*)"', pages))
    assert [name for name in fastrl.__all__ if f"fastrl.{name}" not in anchors] == []


def test_nothing_comes_from_another_host(site):
    links = {link for text in site.values() for link in fetched(text)}
    assert len(links) > 10
    assert [link for link in links if re.match(r"(\w+:)?//", link)] == []
    # the theme draws such a diagram with a script from another host
    assert [name for name, text in site.items() if "mermaid" in text] == []


def test_pictures_are_there_for_both_palettes(site, folder):
    found = {}
    for name, text in site.items():
        for link in fetched(text):
            if re.search(r"\.(svg|png)(#|$)", link) and not link.startswith("/"):
                place, _, palette = link.partition("#")
                assert (folder / name).parent.joinpath(place).is_file(), (name, link)
                if "pictures/" in place:
                    found.setdefault(name, []).append(palette)
    assert len(found) > 2
    assert {tuple(sorted({*palettes})) for palettes in found.values()} == {
        ("only-dark", "only-light")
    }


def test_formulas_are_drawn(site):
    assert site["objectives/index.html"].count('class="formula"') > 20
    assert [name for name, text in site.items() if 'class="arithmatex"' in text] == []


def test_a_broken_link_stops_the_build(tmp_path):
    """What the settings say of links and anchors is in force."""
    (tmp_path / "docs").mkdir()
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0]
    settings = re.sub(r"^hooks:\n.*\n", "", settings, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(settings)
    options = ("--config-file", str(tmp_path / "mkdocs.yml"))
    for link, broken in (("#there", False), ("#gone", True), ("gone.md", True)):
        (tmp_path / "docs" / "index.md").write_text(f"# There\n\n[a link]({link})\n")
        done = build(tmp_path / "site", *options)
        assert (done.returncode != 0) == broken, done.stderr
