"""The site is built from docs/ without a broken link; it asks nobody for anything, and is searched from files too."""

import importlib.util
import inspect
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shoal
from shoal.cli.main import VERBS
from shoal.data.dali import dali_source
from shoal.tasks.executor import Executor
from shoal.tasks.slurm_executor import SlurmExecutor
from tests.docs.blocks import ROOT, pages
from tests.support.browser import opened, why_not
from tests.support.needs import need


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """docs/build.py."""
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, build: ModuleType) -> Path:
    """The built site, of a copy of mkdocs.yml in a folder of its own."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed (it is in the extra docs)")
    folder = tmp_path_factory.mktemp("site")
    build.gather(folder / "build" / "docs")
    settings = (ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: ['{ROOT}']")
    (folder / "mkdocs.yml").write_text(settings)
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    missing = {page.removeprefix("docs/") for page in pages() if page != "README.md"} - named
    assert missing == set(), "say in `nav` of mkdocs.yml where these are to be found"


def test_every_figure_has_a_command_that_makes_it() -> None:
    """Screenshots and drawings have a script that names them; others are what some command is told to write."""
    scripts = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.py"))
    said = "\n".join((ROOT / page).read_text() for page in ("Makefile", *pages()))
    written = re.findall(r" --(?:svg|plot) docs/images/(\S+\.svg)", said)
    figures = [path.name for path in (ROOT / "docs" / "images").iterdir()]
    assert [name for name in figures if name not in scripts and name not in written] == []


@pytest.mark.parametrize("script", sorted((ROOT / "docs").glob("plot_*.py")), ids=lambda path: path.stem)
def test_drawings_are_what_their_scripts_draw(script: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    runpy.run_path(str(shutil.copy(script, tmp_path)), run_name="__main__")
    (drawn,) = (tmp_path / "images").iterdir()
    assert drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text(), "make figures"


def test_the_site_is_built_without_a_broken_link_and_asks_nobody_for_anything(site: Path) -> None:
    fetched = re.compile(r'(?:src="|<link [^>]*href="|url\()(?:https?:)?//[^")]+')
    outside = {page.name: found for page in site.rglob("*.html") if (found := fetched.findall(page.read_text()))}
    assert outside == {}
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert built >= {page.removeprefix("docs/") for page in pages() if page != "README.md"} | {"index.md"}


def test_the_reference_has_every_public_name_and_the_command_line_every_verb(site: Path, build: ModuleType) -> None:
    reference = (site / "reference.html").read_text()
    for name in shoal.__all__:
        assert f"shoal.{name}</code>" in reference, name
        assert getattr(shoal, name).__doc__, name
    for name in build.ELSEWHERE:
        assert f"{name}</code>" in reference, name
    assert "Trains an ordinary LightningModule under a shoal plan" in reference
    assert "Builds the model, an" in reference  # of an attribute's docstring
    commands = (site / "command-line.html").read_text()
    assert [name for name, verb in VERBS.items() if verb.ABOUT and f'id="shoal-{name}"' not in commands] == []


def test_what_pages_import_from_rooms_of_shoal_is_in_the_reference(build: ModuleType) -> None:
    imported = re.compile(r"^(?:>>> )?from (shoal\.[\w.]+) import (.+)$", re.MULTILINE)
    named = re.compile(r"\bshoal(?:\.[a-z_]+)+\.[A-Z]\w+")
    missing = set()
    for page in pages():
        text = (ROOT / page).read_text()
        names = {f"{module}.{name}" for module, names in imported.findall(text) for name in names.split(", ")}
        names |= set(named.findall(text))
        missing |= {name for name in names if not any(f"{name}.".startswith(f"{each}.") for each in build.ELSEWHERE)}
    assert missing == set()


def test_every_argument_of_a_public_function_is_explained_in_its_docstring() -> None:
    silent = []
    for name in shoal.__all__:
        public = getattr(shoal, name)
        if inspect.isfunction(public) or name in ("Loader", "View"):
            doc = inspect.getdoc(public) or ""
            arguments = inspect.signature(public).parameters
            silent += [f"{name}({argument})" for argument in arguments if argument not in doc]
    for public in (dali_source, Executor, SlurmExecutor):
        doc, arguments = inspect.getdoc(public) or "", inspect.signature(public).parameters
        silent += [f"{public.__name__}({argument})" for argument in arguments if argument not in doc]
    assert silent == []


def test_a_file_that_a_page_links_to_is_shown_with_its_source(site: Path) -> None:
    shown = (site / "source/shoal/data/order.py.html").read_text()
    assert "keyed" in shown


def test_a_link_to_nothing_is_an_error(build: ModuleType) -> None:
    linked: set[str] = set()
    assert build._relinked("../tests/data/test_order.py", "docs/fit.md", linked) == "source/tests/data/test_order.py.md"
    assert build._relinked("docs/fit.md#an-example", "README.md", linked) == "fit.md#an-example"
    assert build._relinked("../api.md", "docs/coming-from/ddp.md", linked) == "../api.md"
    assert build._relinked("nowhere.md", "docs/fit.md", linked) == "nowhere.md"  # which the build then complains about
    assert linked == {"tests/data/test_order.py"}


def test_the_search_finds_pages_from_the_file_system(site: Path) -> None:
    need(why_not())
    said: list[Any] = []
    with opened(site / "index.html") as page:
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        page.wait_for_timeout(300)
        page.keyboard.press("Control+k")
        page.wait_for_timeout(300)
        page.keyboard.type("checkpoint")
        page.locator("dialog").get_by_text("Faults").first.wait_for()
        page.keyboard.press("Enter")
        page.wait_for_url("**/*.html?h=checkpoint*")
    assert said == []


def test_the_extra_for_the_site_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = (ROOT / "constraints.txt").read_text().lower()
    assert all(re.split("[>=]", package)[0] + "==" in pins for package in extras["docs"])
