"""Optional packages: what a test needs, and the line that installs it, which `make test` prints at its end."""

import importlib.util
import os
import shutil
import sys

from cleanmarl.envs import EnvError, smaclite
from cleanmarl.envs.pool import envpool_spec

import pytest

GROUPS = {  # of pyproject.toml: the modules that tests import
    "atari": ["ale_py", "cv2"],
    "box2d": ["Box2D"],
    "docs": ["sphinx", "myst_parser", "furo", "pygments", "latex2mathml"],
    "eval": ["pandas", "matplotlib", "scipy"],
    "tune": ["optuna"],
    "export": ["onnxruntime", "onnxscript"],
    "mujoco": ["mujoco"],
    "multiagent": ["lbforaging", "rware", "pymunk", "scipy"],
    "oracles": ["torchrl", "stable_baselines3"],
    "ray": ["ray"],
    "smax": ["jaxmarl"],
    "video": ["moviepy"],
}
INSTALL = {module: f"python bootstrap.py {group}" for group, modules in GROUPS.items() for module in modules}
INSTALL |= {"smaclite": smaclite.INSTALLING, "Qt 5": "apt install libqt5gui5", "g++": "apt install g++"}


def is_there(name: str) -> bool:
    """Whether a module, "Qt 5" or "g++" can be had; nothing but Procgen's part of envpool needs Qt."""
    if name == "g++":  # what torch.compile calls
        return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None
    if name != "Qt 5":
        return importlib.util.find_spec(name) is not None
    try:
        envpool_spec("StarpilotEasy-v0")
    except EnvError:
        return False
    return True


def reason(name: str) -> str:
    return f"{name} is not installed: {INSTALL.get(name, f'pip install {name}')}"


def need(*names: str) -> None:
    """Skip the test that calls it if one of `names`, modules or "Qt 5", is missing."""
    for name in names:
        if not is_there(name):
            pytest.skip(reason(name))


def needs(*names: str) -> pytest.MarkDecorator:
    """The same as a mark: of a test, a parameter or, as `pytestmark`, a file."""
    missing = [name for name in names if not is_there(name)]
    return pytest.mark.skipif(bool(missing), reason=reason(missing[0]) if missing else "")
