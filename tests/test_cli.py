"""cli.py: declared ranges hold for every number of a dataclass, with one line that says what is allowed."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cleanmarl.__main__ import scripts
from cleanmarl.cli import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RunArgs,
    UnitFloat,
    UsageError,
    check_range,
    flag,
    load_args,
    parse,
    set_up,
)
from cleanmarl.folder import as_json

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Lt
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass
class Args(RunArgs):
    eval_episodes: int = 100
    num_envs: PositiveInt = 4
    gamma: tuple[UnitFloat, ...] = (0.99,)
    target_kl: PositiveFloat | None = None
    polyak: Annotated[float, Interval(gt=0, le=1)] = 0.01
    inner_clip_coef: Annotated[float, Interval(ge=0, le=math.inf)] = 0.1
    bias: float = -3.0
    units: list[PositiveInt] = field(default_factory=lambda: [64])


@pytest.mark.parametrize(
    "wish, line",
    [
        ({"num_envs": 0}, "--num-envs must be greater than 0, not 0"),
        ({"gamma": (0.9, 1.5)}, "--gamma must be in [0, 1], not 1.5"),
        ({"gamma": (math.nan,)}, "--gamma must be in [0, 1], not nan"),
        ({"target_kl": 0.0}, "--target-kl must be greater than 0, not 0.0"),
        ({"target_kl": math.inf}, "--target-kl must be finite, not inf"),
        ({"polyak": 0.0}, "--polyak must be in (0, 1], not 0.0"),
        ({"inner_clip_coef": -0.1}, "--inner-clip-coef must be in [0, inf], not -0.1"),
        ({"bias": -math.inf}, "--bias must be finite, not -inf"),
        ({"bias": math.nan}, "--bias must be finite, not nan"),
        ({"eval_episodes": -1}, "--eval-episodes must be at least 0, not -1"),  # RunArgs has the range
        ({"seed": 2**32}, "--seed must be in [0, 4294967296), not 4294967296"),
        ({"torch_threads": 0}, "--torch-threads must be greater than 0, not 0"),
        ({"units": [3, 0]}, "--units must be greater than 0, not 0"),
    ],
)
def test_a_number_outside_its_range_is_one_line(wish, line):
    with pytest.raises(UsageError) as error:
        Args(**wish)
    assert str(error.value) == line


def test_the_ends_of_ranges_are_as_declared():
    args = Args(num_envs=1, gamma=(0.0, 1.0), polyak=1.0, inner_clip_coef=math.inf, eval_episodes=0, seed=2**32 - 1)
    assert args.gamma == (0.0, 1.0) and args.target_kl is None and args.eval_episodes == 0


@pytest.mark.parametrize(
    "wish, line",
    [
        ({"gamma": np.float32(1.5)}, "--gamma must be in [0, 1], not 1.5"),
        ({"torch_threads": np.int64(0)}, "--torch-threads must be greater than 0, not 0"),
        ({"eval_episodes": 20.0}, "--eval-episodes must be an integer, not 20.0"),
        ({"torch_threads": None}, "--torch-threads must be an integer, not None"),
        ({"gamma": "0.5"}, "--gamma must be a number, not '0.5'"),
        ({"gamma": (0.5, None)}, "--gamma must be a number, not None"),
    ],
)
def test_what_python_may_give_is_checked_too(wish, line):
    with pytest.raises(UsageError) as error:
        Args(**wish)
    assert str(error.value) == line


def test_numbers_of_numpy_and_paths_are_as_good_as_pythons(tmp_path):
    args = Args(seed=np.int64(3), gamma=np.float64(0.5), target_kl=np.float32(0.25), polyak=1, runs_dir=tmp_path)
    assert [type(x) for x in (args.seed, args.gamma, args.target_kl)] == [int, float, float] and args.target_kl == 0.25


BOUNDS = {Gt: lambda x, b: x > b, Ge: lambda x, b: x >= b, Lt: lambda x, b: x < b, Le: lambda x, b: x <= b}


@settings(deadline=None)
@given(st.sampled_from([Gt, Ge]), st.sampled_from([Lt, Le]), st.integers(-3, 3), st.integers(-3, 3), st.integers(-4, 4))
def test_ranges_are_their_comparisons(left, right, low, high, value):
    allowed = BOUNDS[left](value, low) and BOUNDS[right](value, high)
    try:
        check_range("--x", value, Annotated[float, left(low), right(high)])
        assert allowed
    except UsageError:
        assert not allowed


@dataclass
class Choices(Args):
    optimizer: Literal["adam", "rmsprop"] = "adam"
    depth: Literal[1, 2] | None = None
    is_deep: bool | None = None
    anneal_lr: bool = True


def test_choices_are_those_of_the_command_line():
    """Another word was taken for the last choice: qmix.Args(optimizer="adam") trained with RMSprop."""
    Choices(optimizer="rmsprop", depth=2, is_deep=True, anneal_lr=np.bool_(False))
    for wrong, line in (
        ({"optimizer": "Adam"}, "--optimizer must be 'adam' or 'rmsprop', not 'Adam'"),
        ({"optimizer": None}, "--optimizer must be 'adam' or 'rmsprop', not None"),
        ({"depth": 3}, "--depth must be 1 or 2 or None, not 3"),
        ({"depth": True}, "--depth must be 1 or 2 or None, not True"),
        ({"is_deep": 1}, "--is-deep must be False or True or None, not 1"),
        ({"anneal_lr": "False"}, "--anneal-lr must be False or True, not 'False'"),
    ):
        with pytest.raises(UsageError) as caught:
            Choices(**wrong)
        assert str(caught.value) == line


@pytest.mark.parametrize("hint", [NonNegativeInt, NonNegativeFloat])
def test_zero_is_not_negative(hint):
    check_range("--x", 0, hint)
    with pytest.raises(UsageError):
        check_range("--x", -1, hint)


def test_set_up_makes_runs_repeat():
    draws = []
    for _ in range(2):
        assert set_up(Args(seed=3)) == torch.device("cpu")
        draws.append(torch.rand(3))
    assert torch.equal(*draws) and torch.get_num_threads() == 1
    with pytest.raises(UsageError, match=r"^--device nothing is not there .*--device cpu always is$"):
        set_up(Args(device="nothing"))


@dataclass
class CopyArgs(Args):
    """Fields that a copy of a script may have."""

    pretrained: Path | None = None
    places: tuple[Path, ...] = ()
    sizes: list[int] = field(default_factory=lambda: [64, 64])
    mixed: tuple[int, Path] = (1, Path("e"))
    kernels: tuple[tuple[int, int], ...] = ((8, 4),)
    weights: dict[str, float] = field(default_factory=dict)
    name: str | None = None


def test_arguments_come_back_as_they_were(tmp_path):
    """What --resume, enjoy and load build of args.json has the types of the run that wrote it."""
    args = CopyArgs(
        gamma=(0.9, 0.99),
        pretrained=Path("a.pt"),
        places=(Path("b"),),
        sizes=[3, 4],
        kernels=((3, 1), (2, 2)),
        weights={"c": 0.5},
        name="d",
    )
    for wanted in (args, CopyArgs()):
        meta = {"script": "copy", "args": vars(wanted)}
        (tmp_path / "args.json").write_text(json.dumps(meta, default=as_json))
        read = load_args(CopyArgs, tmp_path, "copy")
        assert read == wanted and type(read.sizes) is list
    assert json.dumps({"seed": np.int64(3), "gamma": np.float32(0.5)}, default=as_json) == '{"seed": 3, "gamma": 0.5}'


def test_a_resumed_run_has_the_flag_that_another_needs(tmp_path):
    meta = {"script": "copy", "args": vars(CopyArgs(capture_video=True))}
    (tmp_path / "args.json").write_text(json.dumps(meta, default=as_json))
    assert parse(CopyArgs, ["--resume", str(tmp_path), "--video-interval", "9"], "copy").video_interval == 9
    with pytest.raises(UsageError, match="--video-interval does nothing without --capture-video"):
        parse(CopyArgs, ["--video-interval", "9"], "copy")


def test_help_of_a_copy_knows_fields_that_are_made_anew(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(CopyArgs, ["--help"], "copy")
    assert stopped.value.code == 0 and re.search(r"--sizes .*64 64", capsys.readouterr().out, re.DOTALL)


def test_help_may_be_cut_off():
    command = f"{sys.executable} -m cleanmarl.ppo --help | head -2"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert "usage" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("script", scripts())
def test_help_has_every_flag_in_its_box_with_its_range(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    module = importlib.import_module(f"cleanmarl.{script}")
    with pytest.raises(SystemExit) as stopped:
        parse(module.Args, ["--gamma", "0.9", "--help"], script)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert module.__doc__.splitlines()[0] in " ".join(text.split())
    _, *parts = re.split(r"^ (\w+) options +\n -+ *\n", text, flags=re.MULTILINE)  # without Unicode, no boxes
    boxes = dict(zip(parts[::2], parts[1::2]))
    assert list(boxes) == ["environment", "algorithm", "run"]
    flags = {}  # box -> flag -> what is said of it
    for name, box in boxes.items():
        _, *parts = re.split(r"^ {2}(--[\w-]+)", box, flags=re.MULTILINE)
        flags[name] = dict(zip(parts[::2], [" ".join(part.split()) for part in parts[1::2]]))
    assert {"--env-id", "--total-timesteps"} <= flags["environment"].keys()
    assert flags["run"].keys() >= {flag(field.name) for field in dataclasses.fields(RunArgs)}
    shown = [name for box in flags.values() for name in box]
    assert sorted(shown) == sorted(flag(field.name) for field in dataclasses.fields(module.Args))
    assert re.search(r"\(in \[0, 1\]; default: [\d. ]+\)$", flags["algorithm"]["--gamma"])
    assert "(at least 0; default: " in flags["run"]["--eval-episodes"]


def test_what_learns_nothing_does_not_wait_for_torch():
    """As benchmark/report.py, or worker processes with an environment of a module that imports this one."""
    code = "import sys, cleanmarl.cli, cleanmarl.finite; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
