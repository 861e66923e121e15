"""SMAX, `smax/<scenario>`: JaxMARL's StarCraft-like battles, all environments of a batch in one compiled call.

`smax/3m`, `smax/2s3z`, ...: a team of allies against enemies that follow JaxMARL's heuristic, HeuristicEnemySMAX. Names
are those of SMAC, the game is not: compare its numbers with SMAX's only, never with SMAC's or SMAClite's.

    observation     for the other allies, then the enemies, 13 numbers each (zeros if dead or out of sight): health, x
                    and y from oneself over the sight range, last move x and y, last target, weapon cooldown, type
                    one-hot (marine, marauder, stalker, zealot, zergling, hydralisk); then of oneself 10: health, x and
                    y over the map's size, weapon cooldown, type one-hot
    action          0 up, 1 right, 2 down, 3 left, 4 stop, 5 + e shoot enemy e, legal while e is alive and in range
    state           SMAX's world_state: health, x, y, cooldown and type one-hot of every unit, teams, types
    reward          the team's, for each ally that was alive: the share of the enemies' health that was lost in this
                    step, and 1 (option won_battle_bonus) for a win; the mean over those allies is JaxMARL's reward
    dead agent      observation and reward 0; only action 0 is legal, and is passed on as "stop"
    episode end     termination when a team is dead, truncation in the step after max_steps (option, 100: so 101 steps);
                    battle_won when all enemies are dead and an ally is alive; units at the edge of the map die.
                    JaxMARL's baselines take the time limit for an end: --no-time-limit-bootstrap, without which
                    some teams learn to run away (the page of mappo.py)
    seeds           reset(seed=s) gives jax.random.PRNGKey(env_seeds(s, N)[i]) to environment i, for all its episodes

`options` are those of JaxMARL's SMAX and HeuristicEnemySMAX that the scenario leaves open: max_steps,
see_enemy_actions, walls_cause_death, enemy_shoots, attack_mode ("closest" or "random"), observation_type ("unit_list"
or "conic"), unit_type_health (a list of six numbers), ...; and render_mode "rgb_array". The first reset and step of a
batch size compile, which takes some seconds to a minute; a second batch of that size does not compile again, nor does a
later process: it is kept in ~/.cache/cleanmarl, or where XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR say.

The group `smax` installs it: `python3 bootstrap.py smax`.

Source: Rutherford et al. 2023, "JaxMARL: Multi-Agent RL Environments and Algorithms in JAX"
(https://arxiv.org/abs/2311.10090), https://github.com/FLAIROx/JaxMARL
"""

import contextlib
import functools
import hashlib
import io
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from cleanmarl.envs import (
    EnvError,
    EpisodeStatistics,
    MultiAgentVectorEnv,
    building,
    check_actions,
    env_seeds,
    unknown_name,
)

import numpy as np

INSTALLING = "python bootstrap.py smax, or pip install jaxmarl==0.2.0 gymnax==0.0.9"
REPORTED = ("3m", "2s3z", "3s5z", "5m_vs_6m", "8m")
OF_SCENARIO = ("num_allies", "num_enemies", "smacv2_position_generation", "smacv2_unit_type_generation")
STOP = 4  # the only action of a dead unit in SMAX


def cache_folder() -> Path:
    """Where JAX keeps what it has compiled. It is machine code: each kind of CPU that shares the home has its own."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only
    features = re.search(r"^(flags|Features)\b.*", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    kind = hashlib.sha256(f"{platform.machine()} {features and features[0]}".encode()).hexdigest()[:8]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (no home is no error)
    return Path(cache, "cleanmarl", f"jax-{kind}")


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # its arrays are small, and a GPU is for the networks
try:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which other environments it finds
        # Not for us, and its import would put sys.stdout back.
        sys.modules["jaxmarl.environments.mabrax"] = None  # type: ignore[assignment]
        import jax
        import jax.numpy as jnp
        from jaxmarl.environments.smax import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    MISSING = None
except ImportError as error:
    MISSING = error


def known_names() -> list[str]:
    """Those of most interest, then all others that JaxMARL knows."""
    if MISSING:
        raise EnvError(f"smax/... needs a package that is missing ({MISSING}): {INSTALLING}") from MISSING
    return [*dict.fromkeys((*REPORTED, *MAP_NAME_TO_SCENARIO))]


def make(name: str, num_envs: int = 1, render_mode: str | None = None, **options) -> "SmaxVectorEnv":
    """`num_envs` copies of `smax/<name>`; render_mode "rgb_array" for pictures.

    Raises EnvError with one line for an unknown name, an option that SMAX does not take, or a missing package.
    """
    if name not in known_names():
        raise unknown_name(f"smax/{name}", known_names())
    if render_mode not in (None, "rgb_array"):
        raise EnvError(f"smax/{name}: render_mode must be None or 'rgb_array', not {render_mode!r}")
    if options.get("action_type", "discrete") != "discrete":
        raise EnvError(f"smax/{name}: action_type must be 'discrete', not {options['action_type']!r}")
    if options.get("attack_mode", "closest") not in ("closest", "random"):  # JaxMARL takes any other for "closest"
        raise EnvError(f"smax/{name}: attack_mode must be 'closest' or 'random', not {options['attack_mode']!r}")
    if given := [option for option in OF_SCENARIO if option in options]:  # JaxMARL takes it, and does not look at it
        raise EnvError(f"smax/{name}: {given[0]} is what the scenario says, and no option")
    with building(f"smax/{name}", options):
        game = Game(name, **{key: tuple(x) if isinstance(x, list) else x for key, x in options.items()})
    return SmaxVectorEnv(name, num_envs, game, render_mode)


@functools.cache  # what is compiled serves all batches of a game
class Game:
    """`reset` and `step` of N environments at once, compiled for each N.

    A batch is (keys (N, 2), JaxMARL's states with N in front); what is seen of it: obs (N, A, D), state (N, S),
    action_mask (N, A, K) and alive (N, A + E), allies before enemies.
    """

    def __init__(self, name: str, **options):
        options = {key: jnp.array(x, float) if isinstance(x, tuple) else x for key, x in options.items()}
        self.env = HeuristicEnemySMAX(scenario=MAP_NAME_TO_SCENARIO[name], **options)
        self.reset, self.step = jax.jit(self._reset), jax.jit(self._step)

    def _reset(self, keys):
        """keys (N, 2), where the environments' random numbers go on -> batch, seen."""
        keys, begin = split(keys)
        obs, state = jax.vmap(self.env.reset)(begin)
        state = jax.tree.map(lambda x: x.astype(x.dtype), state)  # strong types, as later: else step compiles twice
        return (keys, state), self._see(obs, state)

    def _step(self, batch, action):
        """action (N, A) -> batch, seen, and before episodes that ended began again: seen, reward (N,), done (N,)."""
        keys, state = batch
        keys, now = split(keys)
        now, begin = split(now)  # as JaxMARL's step() does with its key
        actions = {agent: action[:, a] for a, agent in enumerate(self.env.agents)}
        obs, state, reward, done, _ = jax.vmap(self.env.step_env)(now, state, actions)
        last, reward, done = self._see(obs, state), reward[self.env.agents[0]], done["__all__"]

        def begin_again():
            obs, first = jax.vmap(self.env.reset)(begin)
            pairs = (first, self._see(obs, first)), (state, last)
            return jax.tree.map(lambda x, y: jnp.where(done.reshape(-1, *[1] * (y.ndim - 1)), x, y), *pairs)

        state, seen = jax.lax.cond(done.any(), begin_again, lambda: (state, last))
        return (keys, state), seen, last, reward, done

    def _see(self, obs, state):
        mask = jax.vmap(self.env.get_avail_actions)(state)
        seen, legal = (jnp.stack([each[agent] for agent in self.env.agents], axis=1) for each in (obs, mask))
        return seen, obs["world_state"], legal.astype(bool), state.state.unit_alive


def split(keys):
    """Two new keys (N, 2) for each of N."""
    both = jax.vmap(jax.random.split)(keys)
    return both[:, 0], both[:, 1]


class SmaxVectorEnv(MultiAgentVectorEnv):
    """N copies of one scenario; see the module's docstring."""

    team_reward, may_die = True, True

    def __init__(self, name: str, num_envs: int, game: Game, render_mode: str | None):
        self.env_id, self.game, self.render_mode, self.batch = f"smax/{name}", game, render_mode, None
        env, A = game.env, game.env.num_agents
        self.time_limit = env.max_steps + 1
        self._set_spaces(num_envs, env.agents, [env.obs_size] * A, [env.num_ally_actions] * A, env.state_size)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode everywhere; without a seed, each environment's sequence of episodes goes on."""
        if seed is None and self.batch is not None:
            keys = self.batch[0]
        else:
            keys = jax.vmap(jax.random.PRNGKey)(np.array(env_seeds(seed, self.num_envs), np.uint32))
        self.batch, seen = self.game.reset(keys)
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        obs, state, self.action_mask, alive = self._arrays(seen)
        self.agent_mask = alive[:, : self.num_agents]
        return obs, self._info(state)

    def step(self, action: np.ndarray):
        """One step everywhere; action (N, A) integers. Raises EnvError for an illegal one, before anything moves."""
        if self.batch is None:
            raise EnvError(f"{self.env_id}: call reset() before step(), and not after close()")
        action = check_actions(self.env_id, self.agents, action, self.action_mask)
        action = np.where(self.agent_mask, action, STOP).astype(np.int32)
        self.batch, seen, last, team, done = self.game.step(self.batch, action)
        reward = np.asarray(team)[:, None] * self.agent_mask
        self.statistics.add(reward)
        obs, state, self.action_mask, alive = self._arrays(seen)
        self.agent_mask = alive[:, : self.num_agents]
        done, info = np.array(done), self._info(state)
        termination = np.zeros_like(done)
        if done.any():
            *final, alive = self._arrays(last)
            allies, enemies = alive[:, : self.num_agents].any(1), alive[:, self.num_agents :].any(1)
            termination = done & ~(allies & enemies)
            final.append(alive[:, : self.num_agents])
            for key, value in zip(("final_obs", "final_state", "final_action_mask", "final_agent_mask"), final):
                value[~done] = 0
                info[key] = value
            info["_final_obs"] = done.copy()
            self.statistics.end(done, info, battle_won=allies & ~enemies)
        return obs, reward, termination, done & ~termination, info

    def render(self, size: int = 400) -> Any:
        """Environment 0 as a picture (size, size, 3) uint8: allies blue, enemies red, the weaker the paler."""
        if self.render_mode is None or self.batch is None:
            raise EnvError(f"{self.env_id}: to render, make it with render_mode='rgb_array' and reset it")
        env, units = self.game.env, jax.tree.map(lambda x: np.asarray(x[0]), self.batch[1].state)
        x, y = np.meshgrid(*((np.arange(size) + 0.5) / size * side for side in (env.map_width, env.map_height)))
        frame = np.full((size, size, 3), 0.97)
        for i in np.flatnonzero(units.unit_alive):
            kind, (left, up) = units.unit_types[i], units.unit_positions[i]
            color = np.array((0.15, 0.35, 0.85) if i < self.num_agents else (0.85, 0.2, 0.15))
            health = units.unit_health[i] / env.unit_type_health[kind]
            body = np.hypot(x - left, y[::-1] - up) < env.unit_type_radiuses[kind]
            frame[body] = 0.8 + (0.2 + 0.8 * float(health)) * (color - 0.8)
        return (frame * 255).round().astype(np.uint8)

    def close_extras(self, **kwargs) -> None:
        self.batch = None

    def _arrays(self, seen) -> list[np.ndarray]:
        """obs, state, action_mask and alive as writable arrays of their own; a dead agent has action 0."""
        obs, state, mask, alive = map(np.array, seen)
        dead = ~alive[:, : self.num_agents]
        mask[dead] = np.arange(mask.shape[-1]) == 0
        return [obs, state, mask, alive]

    def _info(self, state: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": state, "action_mask": self.action_mask.copy(), "agent_mask": self.agent_mask.copy()}
