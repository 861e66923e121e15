"""The docs build without warnings, and say what the code says."""

import dataclasses
import importlib
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from cleanmarl.envs import EnvError, make

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("algorithms/*.md"))


def load_generate():
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("generate")
    finally:
        sys.path.remove(str(DOCS))


generate = load_generate()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built pages."""
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "doctrees")]
    build = subprocess.run([*command, str(DOCS), str(out / "html")], capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return out / "html"


def text_of(page: Path) -> str:
    """A page without its markup."""
    return unescape(re.sub(r"<[^>]*>", "", page.read_text()))


def links(page: Path) -> set[str]:
    """Targets inside the site that a page links to."""
    targets = {unescape(href) for href in re.findall(r'<a\b[^>]*\bhref="([^"]*)"', page.read_text())}
    return {target for target in targets if target and "://" not in target}


def has_anchor(page: Path, anchor: str) -> bool:
    return re.search(rf'\b(id|name)="{re.escape(anchor)}"', page.read_text()) is not None


@pytest.mark.parametrize("script", PAGES)
def test_page_has_every_flag_with_its_default(site, script):
    args_class = importlib.import_module(f"cleanmarl.{script}").Args
    text = text_of(site / "algorithms" / f"{script}.html")
    for field in dataclasses.fields(args_class):
        row = re.search(rf"^--{field.name.replace('_', '-')}\b[^\n]*\n+([^\n]*)\n", text, re.MULTILINE)
        assert row, f"{script}: --{field.name} is missing"
        if isinstance(field.default, int | float):
            assert type(field.default)(eval(row[1])) == field.default, f"{script}: default of --{field.name}"


def test_every_link_of_the_site_leads_somewhere(site):
    """Sphinx checks its own links, but not those to lines of the source pages."""
    lines = 0
    for page in site.rglob("*.html"):
        for target in links(page):
            file, _, anchor = target.partition("#")
            goal = (page.parent / file).resolve() if file else page
            assert goal.exists(), f"{page.relative_to(site)} links to {target}"
            assert not anchor or has_anchor(goal, anchor), f"{page.relative_to(site)} links to {target}"
            lines += "/source/" in target
    assert lines > 20


def test_links_to_tags_lead_to_the_tagged_lines():
    for path in generate.scripts():
        source = path.read_text().splitlines()
        for tag in generate.script_tags(path):
            assert f"detail {tag.detail}" in source[tag.line - 1]


def test_ppo_has_the_core_details_and_they_are_proved():
    core = {f"core-{n}" for n in range(1, 14)}
    assert core <= {tag.detail for tag in generate.script_tags(ROOT / "cleanmarl" / "ppo.py")}
    assert core <= {tag.detail for tag in generate.test_tags()}


def test_detail_ids_are_those_of_the_source():
    counts = {}
    for detail in generate.DETAILS:
        family, number = detail.rsplit("-", 1)
        counts[family] = counts.get(family, 0) + 1
        assert int(number) == counts[family]
    assert counts == {
        "core": 13,
        "atari": 9,
        "continuous": 9,
        "lstm": 5,
        "procgen": 1,
        "multidiscrete": 1,
        "aux": 4,
    }


def test_unknown_detail_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "cleanmarl").mkdir()
    script = tmp_path / "cleanmarl" / "new.py"
    script.write_text('"""See `detail core-99`."""\n\n# detail core-1, detail core-14: no such thing\n')
    with pytest.raises(ValueError, match=r"cleanmarl/new.py:3: there is no detail core-14"):
        generate.script_tags(script)


def test_proofs_belong_to_the_test_around_or_below(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    code = (
        "def test_a():\n    # proves core-2\n    pass\n\n\n# proves core-3\n# proves core-4\ndef helper():\n    pass\n"
    )
    code += "\n\n@mark\ndef test_b():\n    pass\n"
    (tmp_path / "tests" / "test_x.py").write_text(code)
    found = [(tag.detail, tag.test, tag.line) for tag in generate.test_tags()]
    assert found == [("core-2", "test_a", 1), ("core-3", "test_b", 13), ("core-4", "test_b", 13)]
    (tmp_path / "tests" / "test_x.py").write_text(code + "\n\n# proves core-5\n")
    with pytest.raises(ValueError, match="no test follows"):
        generate.test_tags()


def test_results_go_to_the_script_whose_name_is_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ppo_cartpole.md").write_text("| cartpole |\n")
    (tmp_path / "results" / "ppo_atari_pong.md").write_text("| pong |\n")
    (tmp_path / "results" / "ppo_atari_pong.svg").write_text("<svg/>")
    names = ["ippo", "ppo", "ppo_atari"]
    assert generate.results_of("ippo", names) == ""
    assert "cartpole" in generate.results_of("ppo", names) and "pong" not in generate.results_of("ppo", names)
    assert "](/results/ppo_atari_pong.svg)" in generate.results_of("ppo_atari", names)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_between_files_lead_somewhere(site, name):
    """The links that a reader of the repository follows; an anchor in a page of the docs must be there once built."""
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists(), f"{name} links to {target}"
        if anchor:
            page = site / Path(file).relative_to("docs").with_suffix(".html")
            assert has_anchor(page, anchor), f"{name} links to {target}"


def table_rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ENVIRONMENTS = [row for row in table_rows(DOCS / "environments.md") if len(row) == 5]


@pytest.mark.parametrize("row", ENVIRONMENTS, ids=[row[0].split("`")[1] for row in ENVIRONMENTS])
def test_environment_table_is_measured(row):
    env_id, (agents, obs_sizes, actions, state) = row[0].split("`")[1], row[1:]
    options = {"num_workers": 0} if env_id.startswith("pz/") else {}
    try:
        envs = make(env_id, 1, **options)
    except EnvError as error:
        pytest.skip(str(error))
    obs, info = envs.reset(seed=1)
    envs.close()
    assert int(agents) == envs.num_agents == obs.shape[1]
    np.testing.assert_array_equal([int(x) for x in obs_sizes.split(",")], envs.obs_sizes)
    np.testing.assert_array_equal([int(x) for x in actions.split(",")], envs.action_sizes)
    assert int(state) == info["state"].shape[1]
    assert envs.continuous == ("(continuous)" in row[0])


def test_every_dependency_has_a_reason():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    def name(requirement: str) -> str:
        return re.match(r"[\w.-]+", requirement)[0]

    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Dependencies\n")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    explained = {
        ("main" if len(row) == 2 else row[0].strip(" `"), package) for row in rows for package in packages(row)
    }
    wanted = {("main", name(r)) for r in project["project"]["dependencies"]}
    wanted |= {(group, name(r)) for group, rs in project["dependency-groups"].items() for r in rs}
    assert explained == wanted


def packages(row: list[str]) -> list[str]:
    """The package names in a row of a table of dependencies: reason last, packages before it."""
    return re.findall(r"`([^`]+)`", row[-2])
