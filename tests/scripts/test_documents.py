"""Documents that would go stale in silence: links between pages, pictures, the pins."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MAX_PICTURE_BYTES = 150_000
FOLDERS = ("docs", "deploy")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_glossary_names_modules_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    modules = [path for row in rows for path in re.findall(r"`([\w/]+(?:\.py|/))`", row.rsplit(" | ", 1)[1])]
    assert len(modules) > 100
    assert [path for path in modules if not (ROOT / path).exists()] == []


def test_the_architecture_page_names_every_package() -> None:
    """The first two levels of packages; the kernels' operators are told as one."""
    page = (ROOT / "docs/architecture.md").read_text()
    layout = page.partition("## Layout")[2].partition("## Which package")[0]
    roots = [path for root in ("cluster", "worker") for path in (ROOT / root).glob("transom_*")]
    packages = {
        init.parent for root in roots for pattern in ("*", "*/*") for init in root.glob(f"{pattern}/__init__.py")
    }
    unnamed = {str(path.relative_to(ROOT)) for path in packages if f"{path.name}/" not in layout}
    assert unnamed == set()


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs/images").glob("*.png"))
    assert [picture.name for picture in pictures if picture.stat().st_size > MAX_PICTURE_BYTES] == []


def test_every_dependency_is_pinned_inside_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in map(Requirement, [*project["dependencies"], *(text for extra in extras for text in extra)]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
