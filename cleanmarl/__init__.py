"""Single-file deep and multi-agent reinforcement learning in PyTorch."""

import signal
import sys
from pathlib import Path

__version__ = "0.1.0"

# A script that was started from a command line is imported for some seconds: Ctrl-C then ends it without a traceback.
# Once there is something to save, Run handles the signal; programs of benchmark/ that start others do it in `main`.
_by_name = sys.argv[0] == "-m" and any(arg.startswith("cleanmarl.") for arg in sys.orig_argv)  # python -m cleanmarl.ppo
_here = Path(__file__).resolve().parent
_by_path = Path(sys.argv[0]).resolve().parent in (_here, _here.parent / "benchmark")  # python cleanmarl/ppo.py
if (_by_name or _by_path) and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def load(run: Path | str, num_envs: int = 1, greedy: bool = True, checkpoint: str = "checkpoint.pt", **options):
    """What a run folder has learned: `policy(obs, info, done)`, and its environments as `policy.envs`.

    With `greedy` it takes the most probable actions, else samples. `options` go to the environments. See
    cleanmarl.enjoy.Policy.
    """
    from cleanmarl.enjoy import Policy  # only now: a script that starts has no need of it

    return Policy(run, num_envs, greedy, checkpoint, **options)
