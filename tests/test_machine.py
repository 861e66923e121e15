"""machine.py: how much memory is left, by whatever limits it, and whether a process is stopped."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from cleanmarl.envs import EnvError, make, make_gymnasium
from cleanmarl.envs.pool import EnvPool
from cleanmarl.machine import cgroup_folders, cgroup_room, free_memory, gigabytes, is_stopped, too_large

import pytest
from toys import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
GIB = 2**30

ROOM = """
import resource
from cleanmarl.machine import free_memory
before = free_memory()
resource.setrlimit(resource.RLIMIT_AS, (2**31, resource.RLIM_INFINITY))
print(before, free_memory())
bulk = bytes(2**29)
print(free_memory())
"""


def test_what_ulimit_leaves():
    done = subprocess.run([sys.executable, "-c", ROOM], capture_output=True, text=True, check=True)
    before, limited, later = map(int, done.stdout.split())
    assert before > 0 and limited < 2 * GIB
    assert limited - later == pytest.approx(GIB / 2, rel=0.02) or later < before < 2 * GIB


def test_what_the_machine_leaves():
    free = free_memory()
    assert 0 < free < os.sysconf("SC_PHYS_PAGES") * resource.getpagesize() + 2**40
    assert too_large("nothing", 0) is None
    message = too_large("the universe", 1e6 * GIB)
    assert message.startswith("the universe would take 1,000,000.0 GiB of memory, and ") and message.endswith(
        "are free"
    )
    assert gigabytes(18.94 * GIB) == "18.9 GiB"


@pytest.mark.parametrize(
    "limit, used, cached",
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_control_group_leaves(limit, used, cached, tmp_path):
    """Files as the kernel writes them, of both versions."""
    assert cgroup_room(tmp_path) is None
    (tmp_path / limit).write_text(f"{4 * GIB}\n")
    (tmp_path / used).write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 123\n{cached} {GIB // 2}\n")
    assert cgroup_room(tmp_path) == 1.5 * GIB
    (tmp_path / limit).write_text("max\n")
    assert cgroup_room(tmp_path) is None
    assert all(folder.is_relative_to("/sys/fs/cgroup") for folder in cgroup_folders())


def test_who_is_stopped():
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: is_stopped(process.pid))
            process.send_signal(signal.SIGCONT)
            wait_for(lambda: not is_stopped(process.pid))
        finally:
            process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    "build",
    [
        lambda: make("mpe/simple_spread_v3", 10**9),
        lambda: make("mpe/simple_spread_v3?N=100000", 4),
        lambda: make("mpe/simple_tag_v3?num_good=1000000000", 4),
        lambda: make("matrix/penalty", 10**10),
        lambda: make("pz/mpe2/simple_spread_v3?num_workers=0", 10**9),
        lambda: make_gymnasium("CartPole-v1", 10**9),
    ],
)
def test_environments_that_no_machine_holds_are_refused_with_their_gigabytes(build):
    with pytest.raises(EnvError, match=r" would take [\d,.]+ GiB of memory, and [\d,.]+ GiB are free$"):
        build()


def test_pools_that_no_machine_holds_are_refused():
    pytest.importorskip("envpool")
    with pytest.raises(EnvError, match=r"^Breakout-v5: what 1,000,000,000 environments show would take [\d,.]+ GiB"):
        EnvPool("Breakout-v5", 10**9)


@pytest.mark.parametrize(
    "env_id, package, steps",
    [
        ("mpe/simple_spread_v3?max_cycles=7", "numpy", 7),
        ("matrix/penalty?max_cycles=3", "numpy", 3),
        ("pz/mpe2/simple_spread_v3?max_cycles=9&num_workers=0", "mpe2", 9),
        ("pz/sisl/pursuit_v5?num_workers=0", "pettingzoo.sisl.pursuit_v5", 500),
        ("lbf/Foraging-8x8-2p-2f-coop-v3", "lbforaging", 50),
        ("rware/rware-tiny-2ag-v2?max_steps=11", "rware", 11),
        ("jumanji/LevelBasedForaging-v0", "envpool", 100),
        ("smax/3m?max_steps=16", "jaxmarl", 17),
    ],
)
def test_time_limits_are_known(env_id, package, steps):
    pytest.importorskip(package)
    envs = make(env_id, 1)
    assert envs.time_limit == steps
    envs.close()
