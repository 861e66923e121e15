"""Run a script of CleanMARL, as it is, with the packages of today: run_cleanmarl.py SCRIPT.py [FLAG ...]

It looks for MPE in PettingZoo, from where it has moved to mpe2, and imports SMAClite and level-based foraging whether
they are played or not.
"""

import importlib.util
import runpy
import sys
import types
from pathlib import Path

import mpe2
from mpe2 import simple_spread_v3

if __name__ == "__main__":
    sys.modules |= {"pettingzoo.mpe": mpe2, "pettingzoo.mpe.simple_spread_v3": simple_spread_v3}
    missing = [name for name in ("smaclite", "lbforaging") if importlib.util.find_spec(name) is None]
    sys.modules |= {name: types.ModuleType(name) for name in missing}
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
