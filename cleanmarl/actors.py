"""Processes that act for a learner: slots of shared memory, parameters, watching, ending.

    class Player:                                               # in the script: what an actor does
        def __init__(self, args, index, step): ...              # self.envs, with seeds of their own
        def play(self, agent, unrolls): ...                     # fill records (N,) with the next T steps by agent

    with Actors(Player, args, agent, unroll_dtype, step) as actors:
        slot = actors.take(version)                             # of the agent's parameters
        slot["unrolls"], slot["version"], slot["actor"]         # records (N,), played with these parameters, by whom

Actors begin an unroll with the newest parameters and buffers that the learner has published: those of a moment when it
took a slot. Only the numbers of slots travel between the processes. With `args.num_actors` 0 there is one process, and
`take` plays. `RayActors` does the same on many machines.

If an actor dies, or is stopped (SIGSTOP) and silent for a minute, `take` raises an error of one line; if the learner
dies, the actors find their pipes closed and end. For one that is merely slow, and for a Ray actor in both cases, a line
every minute says so.
"""

import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from cleanmarl.cli import RunError, UsageError, import_optional, keep_freed_memory, seed_everything, tell
from cleanmarl.envs import EnvError, check_memory, workers
from cleanmarl.finite import NonFiniteError
from cleanmarl.machine import ACTOR_BYTES

import numpy as np
import torch
import torch.nn as nn

SLOTS_PER_ACTOR = 2  # one to fill while the other waits for the learner
CALLS_PER_ACTOR = 2  # of Ray: one under way while the other waits, so that an actor need not wait for the learner
OTHER_AGENT = "its agent is not the learner's: what main changes of it, a layer or a dtype, belongs into __init__"
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # for the learner alone
MOST_DEATHS = 10  # of Ray's actors in a row, without an unroll between: then it is no accident


def slot_dtype(args: Any, unroll_dtype: np.dtype) -> np.dtype:
    """What an actor hands over at once."""
    fields = [("unrolls", unroll_dtype, (args.num_envs,)), ("version", np.int64), ("actor", np.int64)]
    return np.dtype(fields, align=True)


def check_unrolls_size(args: Any, unroll_dtype: np.dtype, replay_size: int = 0) -> None:
    """Raise EnvError unless there is memory for actors, for what they fill, and for a replay of unrolls.

    The replay is copied for each checkpoint. Actors of Ray are on any machine, and it counts cores for them.
    An actor that gets here, as it imports a file that starts a run, ends: it would begin a run of its own.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit('actors import the file that starts them: put its call of main under if __name__ == "__main__":')
    if not hasattr(args, "address"):
        check_memory(f"the processes of --num-actors {args.num_actors}", float(args.num_actors * ACTOR_BYTES))
    slots = max(1, args.num_actors * SLOTS_PER_ACTOR) * args.num_envs
    what = "unrolls of --num-actors x --num-envs x --unroll-length"
    what += f" and a replay of --replay-size {replay_size}" if replay_size else ""
    check_memory(what, float(slots + 2 * replay_size) * unroll_dtype.itemsize)


def tensors(agent: nn.Module) -> list[torch.Tensor]:
    """All that an agent acts with: parameters and buffers, such as running statistics."""
    return [x for x in (*agent.parameters(), *agent.buffers()) if x.numel()]


def layout(tensors: list[torch.Tensor]) -> list[tuple]:
    """What has to be the same of the tensors of two agents for one to act with those of the other."""
    return [(x.shape, x.dtype) for x in tensors]


class Parameters:
    """The newest parameters and buffers of an agent and their version, in memory that one process writes, others read.

    The version is -1 while they are being written: no process holds a lock when it dies.
    """

    def __init__(self, memory, agent: nn.Module):
        self.version, self.pairs, start = np.frombuffer(memory, np.int64, 1), [], 64
        for x in tensors(agent):
            shared = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start)
            self.pairs.append((x, shared.view(x.shape)))
            start += -(-x.nbytes // 64) * 64

    @staticmethod
    def size(agent: nn.Module) -> int:
        """Bytes of the memory."""
        return 64 + sum(-(-x.nbytes // 64) * 64 for x in tensors(agent))

    @torch.no_grad()
    def write(self, version: int) -> None:
        """Write those of the agent; each time a version of its own."""
        self.version[0] = -1
        for x, shared in self.pairs:
            shared.copy_(x)
        self.version[0] = version

    @torch.no_grad()
    def read(self) -> int:
        """Load the newest into the agent; returns their version."""
        while True:  # again, if they were written meanwhile
            version = int(self.version[0])
            for x, shared in self.pairs:
                x.copy_(shared)
            if version >= 0 and version == self.version[0]:
                return version
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                raise SystemExit  # the learner was killed while it wrote


def send(connection, message: int | str | EnvError | NonFiniteError) -> None:
    with suppress(OSError):  # the other side is gone, which receive notices
        connection.send(message)


def receive(connection) -> Any:
    """The next message, None if the other side is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def act(classes, args, index: int, step: int, connection, learners, parameters_memory, slots_memory, dtype) -> None:
    """The life of an actor process: fill the slots whose numbers come, and send the numbers back."""
    player = None
    os.setsid()  # Ctrl-C in a terminal is for the learner, and not for what environments have started either
    for signum in SIGNALS:  # these would inherit a signal that is blocked or ignored
        signal.signal(signum, lambda *_: None)
    signal.signal(workers.END, lambda *_: sys.exit())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        seed_everything((args.seed + step + index) % 2**32, torch_threads=1)
        keep_freed_memory()
        player_class, agent_class = classes
        player = player_class(args, index, step)
        agent = agent_class(player.envs, dataclasses.replace(args, device="cpu"))  # which --bf16 auto asks for
        if layout(tensors(agent)) != learners:
            return send(connection, OTHER_AGENT)
        parameters, slots = Parameters(parameters_memory, agent), np.frombuffer(slots_memory, dtype)
        gc.freeze()
        while (number := receive(connection)) is not None:
            slots[number]["version"], slots[number]["actor"] = parameters.read(), index
            player.play(agent, slots[number]["unrolls"])
            send(connection, number)
    except Exception as error:
        send(connection, error if isinstance(error, EnvError | NonFiniteError) else traceback.format_exc())
    finally:
        signal.signal(workers.END, signal.SIG_IGN)
        close(player)


def close(player: Any) -> None:
    """Close its environments, whatever they say to it: a simulator that has failed does once more."""
    if player is not None:
        with suppress(Exception):
            player.envs.close()


class Actors:
    """Actor processes and what they share with the learner, memory without a name that nobody can leave behind.

    Every actor has slots and a pipe of its own: its end tells each side that the other one died, whatever the cause.
    `waited`: seconds in which the learner has waited for them.
    """

    def __init__(self, player_class: type, args: Any, agent: nn.Module, unroll_dtype: np.dtype, step: int):
        self.agent, self.deterministic, self.waited = agent, args.deterministic, 0.0
        self.ready: deque = deque()
        self.taken: deque = deque()
        self.player: Any = None  # with --num-actors 0
        self.processes: list[Any] = []
        self.connections, self.heard = [], []
        dtype = slot_dtype(args, unroll_dtype)
        if args.num_actors == 0:
            self.player, self.slots = player_class(args, 0, step), np.zeros(1, dtype)
            return
        context = multiprocessing.get_context("spawn")
        parameters_memory = context.RawArray("b", Parameters.size(agent))
        slots_memory = context.RawArray("b", args.num_actors * SLOTS_PER_ACTOR * dtype.itemsize)
        self.parameters, self.slots = Parameters(parameters_memory, agent), np.frombuffer(slots_memory, dtype)
        self.parameters.write(version=0)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # actors share the cores already
        resource_tracker.ensure_running()  # which unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the actors have handlers, see act
        try:
            for i in range(args.num_actors):
                connection, theirs = context.Pipe()
                self.connections.append(connection)
                shared = theirs, layout(tensors(agent)), parameters_memory, slots_memory, dtype
                arguments = (player_class, type(agent)), args, i, step, *shared
                process = context.Process(target=act, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)
                self.heard.append([time.monotonic()] * 2)  # when it last spoke, and when we last looked after it
                theirs.close()  # so that the pipe ends with the process
                for k in range(1 if args.deterministic else SLOTS_PER_ACTOR):
                    send(connection, i * SLOTS_PER_ACTOR + k)
        except BaseException:  # too many processes or files
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def take(self, version: int) -> np.void:
        """The next full slot; the learner has learned, and its parameters are `version` now.

        If deterministic, actors take turns, and get new parameters when all of them have waited for it.
        Raises RunError if an actor died or failed, and WorkerError if it was stopped; its errors of the environment and
        of numbers that are none as they are.
        """
        if not self.processes:
            self.slots[0]["version"] = version
            self.player.play(self.agent, self.slots[0]["unrolls"])
            return self.slots[0]
        if not self.deterministic:
            self.publish(version)
            return self.release(self.next_number())
        if not self.taken:
            numbers = [self.number_of(i) for i in range(len(self.processes))]
            self.publish(version)  # now that nobody reads
            self.taken.extend(self.release(number) for number in numbers)
        return self.taken.popleft()

    def publish(self, version: int) -> None:
        if version != self.parameters.version[0]:
            self.parameters.write(version)

    def next_number(self) -> int:
        """The number of a slot that an actor has filled; those that are ready take turns."""
        if not self.ready:
            start = time.perf_counter()
            while not self.ready:
                self.ready.extend(multiprocessing.connection.wait(self.connections, workers.SILENCE))
                self.look_after_silent()
            self.waited += time.perf_counter() - start
        return self.number_of(self.connections.index(self.ready.popleft()))

    def number_of(self, i: int) -> int:
        """The number of the next slot that actor i fills; raises as `take`."""
        start = time.perf_counter()
        while not self.connections[i].poll(workers.SILENCE):
            self.look_after_silent([i] if self.deterministic else None)  # the others may wait for their turn
        message = receive(self.connections[i])
        self.waited += time.perf_counter() - start
        self.heard[i] = [time.monotonic()] * 2
        if message is None:
            raise self.death(i)
        if isinstance(message, EnvError | NonFiniteError):
            raise message
        if isinstance(message, str):
            raise RunError(f"actor {i} failed:\n{message}")
        return message

    def death(self, i: int) -> RunError:
        """The error that says how actor i ended."""
        process = self.processes[i]
        process.join(5)
        code = process.exitcode
        how = f"signal {-code}, {signal.strsignal(-code)}" if code is not None and code < 0 else f"exit code {code}"
        return RunError(f"actor {i} (pid {process.pid}) died ({how})")

    def look_after_silent(self, owing: Collection[int] | None = None) -> None:
        """Actors, of those that owe an answer, that have said nothing for long: see `workers.look_after`."""
        now = time.monotonic()
        for i, (spoke, looked) in enumerate(self.heard):
            if (owing is None or i in owing) and now - looked >= workers.SILENCE and not self.connections[i].poll():
                if not self.processes[i].is_alive():  # and what it has forked holds its end of the pipe
                    raise self.death(i)
                pid = self.processes[i].pid
                workers.look_after(f"actor {i} (pid {pid})", pid, now - spoke)
                self.heard[i][1] = now

    def release(self, number: int) -> np.void:
        """A copy of a full slot, which goes back to its actor, so that it goes on while we learn."""
        slot = self.slots[number].copy()
        send(self.connections[slot["actor"]], number)
        return slot

    def close(self) -> None:
        """End the actors: closed pipes tell them, who is busy for two more seconds a signal, then a kill."""
        close(self.player)
        for connection in self.connections:
            connection.close()
        try:
            for seconds in (2, workers.CLOSING):
                end = time.monotonic() + seconds
                for process in self.processes:
                    process.join(max(0, end - time.monotonic()))
                    if seconds == 2 and process.is_alive():
                        os.kill(process.pid, workers.END)
                        os.kill(process.pid, signal.SIGCONT)  # or one that is stopped would not hear of it
        finally:  # if Ctrl-C was pressed once more, at once: Python would wait for them at its exit
            for process in self.processes:
                process.kill()
                process.join()


class RayActor:
    """One of RayActors: a player and its copy of the agent, on any machine."""

    def __init__(self, classes, args: Any, index: int, step: int, dtype: np.dtype):
        seed_everything((args.seed + step + index) % 2**32, torch_threads=1)
        player_class, agent_class = classes
        self.player = player_class(args, index, step)
        self.agent = agent_class(self.player.envs, dataclasses.replace(args, device="cpu"))  # as in act()
        self.slot = np.zeros(1, dtype)
        self.slot["actor"] = index

    @torch.no_grad()
    def play(self, parameters: tuple[int, list[np.ndarray]]) -> np.ndarray:
        """The slot (1,) that follows, with these parameters."""
        self.slot["version"], arrays = parameters
        own, learners = tensors(self.agent), [torch.tensor(array) for array in arrays]
        if layout(own) != layout(learners):
            raise RunError(OTHER_AGENT)
        for x, newest in zip(own, learners):
            x.copy_(newest)
        self.player.play(self.agent, self.slot[0]["unrolls"])
        return self.slot


class RayActors:
    """Actors of a Ray cluster, which `connect` has found, the calls they have to answer, and the newest parameters.

    A call carries no more than the name of parameters in the object store, which a machine fetches once. An actor that
    dies, or whose machine does, is replaced: `num_deaths` so far. If deterministic, calls are taken in their order.
    Of several learners (ranks) each has actors of its own.
    """

    def __init__(self, ray, player_class, args, agent: nn.Module, unroll_dtype: np.dtype, step: int, rank=0, world=1):
        self.ray, self.args, self.agent, self.ranks = ray, args, agent, (rank, world)
        self.classes, self.step, self.dtype = (player_class, type(agent)), step, slot_dtype(args, unroll_dtype)
        self.waited, self.num_deaths, self.deaths_in_a_row, self.version = 0.0, 0, 0, -1
        self.remote = ray.remote(num_cpus=1)(RayActor)
        self.calls: dict[Any, Any] = {}  # call -> the actor that answers it
        self.heard: dict[Any, list] = {}  # actor -> its number, when it spoke and when we looked what is the matter
        self.publish(version=0)
        for i in range(args.num_actors):
            self.add(i)

    def __enter__(self) -> "RayActors":
        return self

    def __exit__(self, *error) -> None:
        self.ray.shutdown()  # which ends the actors

    def add(self, i: int) -> None:
        """The actor number i of this learner; an index of its own gives it other seeds than any other."""
        rank, world = self.ranks
        actor = self.remote.remote(self.classes, self.args, rank + world * i, self.step, self.dtype)
        self.heard[actor] = [i, *[time.monotonic()] * 2]
        for _ in range(CALLS_PER_ACTOR):
            self.calls[actor.play.remote(self.parameters)] = actor

    def take(self, version: int) -> np.void:
        """The slot of the next call that is answered; the learner's parameters are `version` now.

        Raises RunError if an actor failed, or MOST_DEATHS in a row died.
        """
        self.publish(version)
        start = time.perf_counter()
        while True:
            calls = list(self.calls)[: 1 if self.args.deterministic else None]
            ready, _ = self.ray.wait(calls, timeout=workers.SILENCE)
            self.look_after_silent()
            if not ready:
                continue
            # the oldest answer: Ray found any one of them, and might never find that of one of the actors
            answers = self.ray.wait(calls, num_returns=len(calls), timeout=0)[0] or ready
            actor = self.calls.pop(call := answers[0])
            try:
                slot = self.ray.get(call)[0]
            except self.ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), EnvError | NonFiniteError):
                    raise cause from error
                is_failure = isinstance(error, self.ray.exceptions.RayTaskError)  # it lives and says what is wrong
                if is_failure or getattr(error, "actor_init_failed", False):  # or no other one would begin
                    raise RunError(f"an actor failed:\n{error}") from error
                self.replace(actor, error)  # it died, or its machine, or the way there
                continue
            self.calls[actor.play.remote(self.parameters)] = actor
            self.heard[actor][1:] = [time.monotonic()] * 2
            self.waited, self.deaths_in_a_row = self.waited + time.perf_counter() - start, 0
            return slot

    def look_after_silent(self) -> None:
        """A line every minute for an actor that says nothing, stopped or slow: its machine may be any."""
        now = time.monotonic()
        for actor, heard in self.heard.items():
            number, spoke, looked = heard
            if now - looked >= workers.SILENCE:
                heard[2] = now
                calls = [call for call, other in self.calls.items() if other is actor]
                if not self.ray.wait(calls, timeout=0)[0]:  # nor is an answer there that we had no time for
                    tell(f"actor {number} has been silent for {now - spoke:.0f} seconds; waiting for it", sys.stderr)

    def publish(self, version: int) -> None:
        """What the next calls get."""
        if version != self.version:
            arrays = [x.detach().cpu().numpy() for x in tensors(self.agent)]
            self.version, self.parameters = version, self.ray.put((version, arrays))

    def replace(self, actor, error: Exception) -> None:
        self.deaths_in_a_row += 1
        if self.deaths_in_a_row >= MOST_DEATHS:
            raise RunError(f"{MOST_DEATHS} actors in a row died before they played") from error
        self.calls = {call: other for call, other in self.calls.items() if other is not actor}
        del self.heard[actor]
        self.ray.kill(actor)  # if it is only out of reach, it shall not come back
        self.add(self.args.num_actors + self.num_deaths)
        self.num_deaths += 1


def connect(address: str | None, num_actors: int, num_learners: int = 1):
    """The package ray, connected to a cluster: `auto`, HOST:PORT, or, for None, one that begins on this machine.

    Raises UsageError if ray, the cluster or CPUs for all actors are missing.
    """
    ray = import_optional("ray", "impala_ray.py")
    try:
        if address not in (None, "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        ray.init(address=address or "local", include_dashboard=False if address is None else None)
    except (OSError, ValueError) as error:
        hint = "begin one: ray start --head"
        token = Path.home() / ".ray" / "auth_token"  # every local ray.init() leaves it, every `ray start` asks for it
        if token.exists() and os.environ.get("RAY_AUTH_MODE") != "token":
            hint += f"; if it wants the token {token}: export RAY_AUTH_MODE=token"
        raise UsageError(f"there is no Ray cluster at --address {address}; {hint}") from error
    num_cpus, learners = int(ray.cluster_resources().get("CPU", 0)), num_learners if address else 1
    if num_actors * learners > num_cpus:
        ray.shutdown()
        number = f"--num-actors {num_actors} of each of {learners} learners"
        raise UsageError(f"{number} are more than the cluster's {num_cpus} CPUs")
    return ray
