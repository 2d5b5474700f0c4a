"""Files that would go stale in silence: links between pages, pictures, and the pins, which have to agree with each other and with
an index."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "deploy")
SOURCES = ("cluster", "worker", "kernels", "dashboards", "deploy", "docs", "scripts", "tests")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    wrong = [(name, anchor) for name, anchor in targets if anchor not in anchors(page.parent / name if name else page)]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and most viewers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    named = re.findall(rf"(?<![\w/.])((?:{'|'.join(SOURCES)})/[\w./-]*\w(?:\.\w+|/))", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_messages_that_documents_quote_are_in_the_code() -> None:
    """`...`, N, M and X stand for what differs from message to message; the longest piece between them is looked for."""
    files = (path for root in ("cluster", "worker", "kernels") for path in (ROOT / root).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", " ".join(path.read_text() for path in files))  # joins texts over several lines
    errors = (ROOT / "docs/http_api.md").read_text().partition("## Errors")[2]
    rows = re.findall(r"^\|.*$", (ROOT / "docs/troubleshooting.md").read_text() + errors, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row) if text.count(" ") > 2]
    pieces = [max(re.split(r"\.\.\.|\b[NMX]\b|\b\d+ s\b", text), key=len).strip(" ;:,()") for text in quoted]
    assert len(pieces) > 30
    assert [piece for piece in pieces if piece not in code] == []


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


def test_every_dependency_is_pinned_inside_its_range():
    pinned = pins()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in map(Requirement, [*project["dependencies"], *(text for extra in extras for text in extra)]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def lock_script() -> ModuleType:
    loader = SourceFileLoader("lock", str(ROOT / "scripts" / "lock"))
    spec = spec_from_loader("lock", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_triton_is_the_release_that_torch_requires():
    assert pins()["triton"] == lock_script().triton_for(pins()["torch"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", [(), ("--extra", "dev")], ids=["runtime", "dev"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_an_index_resolves_the_pins(python, extra):
    """Metadata alone is read. Local wheels are left out: a CPU build of torch requires no Triton and hides a conflict."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    local = ("PIP_", "UV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(local)}
    command = ["uv", "pip", "compile", "pyproject.toml", "-c", "constraints.txt", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--no-config", "--quiet", *extra]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if "failed to fetch" in result.stderr.lower() or "error sending request" in result.stderr.lower():
        pytest.skip("no package index can be reached")
    assert result.returncode == 0, result.stderr
    assert f"triton=={pins()['triton']}" in result.stdout
