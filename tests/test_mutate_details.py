"""benchmark/mutate_details.py breaks what it says, and each tag of a script has the line that it breaks."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pygments")  # docs/generate.py needs it

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("mutate_details", ROOT / "benchmark" / "mutate_details.py")
mutate_details = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutate_details)
generate = mutate_details.generate


@pytest.mark.parametrize("mutation", mutate_details.MUTATIONS, ids=lambda m: f"{m[0]}-{m[1]}")
def test_a_mutation_changes_one_line_at_its_tag_and_has_a_test_to_catch_it(mutation):
    detail, script, *_ = mutation
    before = (ROOT / "cleanmarl" / f"{script}.py").read_text().splitlines()
    source = mutate_details.mutated(*mutation)  # raises where the old text is not there once, or far from a tag
    after = source.splitlines()
    assert len(before) == len(after) and sum(a != b for a, b in zip(before, after)) == 1
    compile(source, script, "exec")
    assert mutate_details.proofs(detail, script)


def test_text_that_is_missing_repeated_or_far_from_its_tag_is_an_error():
    with pytest.raises(ValueError, match=r"core-3: 'no such text' is 0 times in ppo.py, not once"):
        mutate_details.mutated("core-3", "ppo", "no such text", "")
    with pytest.raises(ValueError, match=r"core-3: 'nn.Tanh' is 4 times in ppo.py, not once"):
        mutate_details.mutated("core-3", "ppo", "nn.Tanh", "")
    with pytest.raises(ValueError, match=r"core-4: 'eps=1e-5' is in line \d+ of ppo.py, and its tags are in"):
        mutate_details.mutated("core-4", "ppo", "eps=1e-5", "")


@pytest.mark.parametrize("script", sorted({script for _, script, *_ in mutate_details.MUTATIONS}))
def test_every_tag_has_a_mutation_here_or_in_a_script_it_descends_from(script):
    """What a test proves of a parent, it proves of a variant only as long as the line is the same."""
    path = ROOT / "cleanmarl" / f"{script}.py"
    family = [p.stem for p in generate.lineage(path)]
    for tag in generate.script_tags(path):
        mutations = [m for m in mutate_details.MUTATIONS if m[0] == tag.detail and m[1] in family]
        assert mutations, f"{tag.detail} is tagged in {path.name} and nothing breaks it"
        nearest = max((m[1] for m in mutations), key=family.index)
        for _, owner, old, _ in mutations:
            if owner == nearest:
                assert old in path.read_text(), f"{tag.detail}: {old!r} of {owner}.py is not in {path.name}"


def test_an_unknown_detail_is_refused_in_one_line(capsys):
    assert mutate_details.main(mutate_details.Args(details=("core-3", "core-99"))) == 2
    assert capsys.readouterr().err == "there is no detail core-99\n"


def test_a_run_says_who_caught_what_and_ends():
    argv = [sys.executable, ROOT / "benchmark" / "mutate_details.py", "core-3", "core-4", "--workers", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "2 of 2 mutations of 2 details caught" in done.stdout, done.stderr


def test_every_detail_has_a_mutation():
    assert {detail for detail, *_ in mutate_details.MUTATIONS} == set(generate.DETAILS)


def test_the_page_has_a_row_of_each_mutation():
    """Which `python benchmark/mutate_details.py` prints; that there are as many says that none is of another time."""
    page = (ROOT / "docs" / "details.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (`.*) \| test_\S.* \|$", page, re.MULTILINE)
    changes = [mutate_details.row_of(*mutation) for mutation in mutate_details.MUTATIONS]
    assert sorted(rows) == sorted(changes)
