"""What this machine says of its memory and of its processes. It imports no torch: worker processes use it too."""

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
ACTOR_BYTES, WORKER_BYTES = 150 * 2**20, 50 * 2**20  # that a process of ours has for itself, at least
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 2, 1


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, a debugger or the like holds a process; where there is no /proc, nobody knows: False."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def free_memory() -> int | None:
    """Bytes that this process may still take without anybody being killed; None where the system does not say.

    The least of what the machine has, what its control groups leave (containers, batch jobs), and `ulimit -v`.
    """
    rooms = [cgroup_room(folder) for folder in cgroup_folders()]
    try:
        numbers = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        rooms.append(sum(1024 * int(numbers[key].split()[0]) for key in ("MemAvailable", "SwapFree")))
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            rooms.append(max(0, limit - used))
    except (OSError, KeyError, ValueError):  # not Linux
        pass
    return min((room for room in rooms if room is not None), default=None)


def cgroup_folders() -> list[Path]:
    """The folders of the control groups that may limit this process's memory, those above its own too."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = CGROUPS / ("memory" if controllers else "")
            inner = root / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return folders


def cgroup_room(folder: Path) -> int | None:
    """Bytes that a control group leaves: its limit less what it uses; files that are only cached do not count.

    None if the folder has no limit.
    """
    for limit, used in CGROUP_FILES:
        try:
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(0, most - now + cached)
    return None


def gigabytes(num_bytes: float) -> str:
    """As people read it: "18.9 GiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB"


def too_large(what: str, num_bytes: float) -> str | None:
    """A line that says so, if there is less memory; None if it fits, or if nobody knows."""
    free = free_memory()
    if free is None or num_bytes <= free:
        return None
    return f"{what} would take {gigabytes(num_bytes)} of memory, and {gigabytes(free)} are free"
