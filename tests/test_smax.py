"""SMAX in batches equals JaxMARL's own loop, one environment after another."""

import os
import subprocess
import sys
from pathlib import Path

from cleanmarl import ippo
from cleanmarl.envs import EnvError, env_seeds, make
from cleanmarl.envs import smax as family
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
from optional import needs

NEEDED = needs("jaxmarl")
GAME = "smax/3m?max_steps=16"  # compiling takes seconds: most tests share this game and batch size
N, LIMIT = 4, 16


def random_legal(mask: np.ndarray, rng) -> np.ndarray:
    return (rng.random(mask.shape) * mask).argmax(-1)


def focus_fire(mask: np.ndarray) -> np.ndarray:
    """Everyone shoots the first enemy in range, else waits for them."""
    return np.where(mask[..., 5:].any(-1), 5 + mask[..., 5:].argmax(-1), np.where(mask[..., 4], 4, 0))


def play(env_id: str, num_envs: int, steps: int, seed: int = 5, policy=None) -> list:
    """[(obs, info)] + [(action, obs, reward, termination, truncation, info), ...]; without a policy, at random."""
    envs, rng = make(env_id, num_envs), np.random.default_rng(0)
    assert envs.team_reward and envs.may_die
    record = [envs.reset(seed=seed)]
    for _ in range(steps):
        mask = record[-1][-1]["action_mask"]
        action = policy(mask) if policy else random_legal(mask, rng)
        record.append((action, *envs.step(action)))
    envs.close()
    return record


@NEEDED
def test_equals_jaxmarl():
    """Observations, masks, rewards and ends are those of JaxMARL's step(), which begins the next episode as here."""
    import jax
    from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario

    env = HeuristicEnemySMAX(scenario=map_name_to_scenario("3m"), max_steps=LIMIT)
    record = play(GAME, N, 70)
    step, step_env, legal = jax.jit(env.step), jax.jit(env.step_env), jax.jit(env.get_avail_actions)
    ends = {"won": 0, "lost": 0, "cut": 0}
    for n, seed in enumerate(env_seeds(5, N)[:2]):
        key, begin = jax.random.split(jax.random.PRNGKey(np.uint32(seed)))
        obs, state = env.reset(begin)
        length, returns = 0, np.zeros(3)

        def seen(obs, state, ours, ours_state, mask, n=n):
            units = state.state.unit_alive[:3]
            np.testing.assert_allclose(ours[n], np.stack([obs[agent] for agent in env.agents]), atol=2e-5)
            np.testing.assert_allclose(ours_state[n], obs["world_state"], atol=5e-4)
            want = np.stack([legal(state)[agent] for agent in env.agents]).astype(bool)
            assert not ours[n][~units].any() and (want[~units] == (np.arange(8) == 4)).all()  # the dead "stop"
            want[~units] = np.arange(8) == 0
            np.testing.assert_array_equal(mask[n], want)

        seen(obs, state, record[0][0], record[0][1]["state"], record[0][1]["action_mask"])
        for action, obs_, reward_, termination, truncation, info in record[1:]:
            alive = np.array(state.state.unit_alive[:3])
            actions = {agent: np.int32(action[n, a] if alive[a] else 4) for a, agent in enumerate(env.agents)}
            key, now = jax.random.split(key)
            last_obs, last, *_ = step_env(jax.random.split(now)[0], state, actions)
            obs, state, reward, done, _ = step(now, state, actions)
            want = float(reward["ally_0"]) * alive
            np.testing.assert_allclose(reward_[n], want, atol=1e-6)
            length, returns, done = length + 1, returns + reward_[n], bool(done["__all__"])
            assert (termination[n] | truncation[n]) == done
            if done:
                allies, enemies = np.split(np.array(last.state.unit_health) > 0, 2)
                assert truncation[n] == (length == LIMIT + 1 and allies.any() and enemies.any())
                seen(last_obs, last, info["final_obs"], info["final_state"], info["final_action_mask"])
                assert info["episode"]["battle_won"][n] == (allies.any() and not enemies.any())
                assert info["episode"]["l"][n] == length
                np.testing.assert_allclose(info["episode"]["r"][n], returns, atol=1e-6)
                ends["won" if info["episode"]["battle_won"][n] else "cut" if truncation[n] else "lost"] += 1
                length, returns = 0, np.zeros(3)
            np.testing.assert_array_equal(info["agent_mask"][n], state.state.unit_alive[:3])
            seen(obs, state, obs_, info["state"], info["action_mask"])
    assert ends["lost"] and ends["cut"]


@NEEDED
def test_won_and_lost_battles():
    """battle_won is what the last state shows: no enemy has health, an ally has."""
    outcomes = []
    for row in play(GAME, N, 200, policy=focus_fire)[1:]:
        done = row[3] | row[4]
        if done.any():
            health = row[-1]["final_state"][:, :60].reshape(N, 6, 10)[..., 0]
            won = (health[:, :3] > 0).any(1) & ~(health[:, 3:] > 0).any(1)
            np.testing.assert_array_equal(row[-1]["episode"]["battle_won"][done], won[done])
            assert row[3][done & won].all() and (row[2][done & won].max(-1) >= 1).all()  # the bonus for a win
            outcomes += won[done].tolist()
    assert 0 < sum(outcomes) < len(outcomes)


@NEEDED
def test_environments_do_not_depend_on_the_batch():
    one, two = play(GAME, N, 1), play(GAME, 2, 1)
    np.testing.assert_array_equal(one[0][0][:2], two[0][0])
    assert len({row.tobytes() for row in one[0][0]}) == N


@NEEDED
def test_compiled_once():
    envs = make(GAME, N)
    envs.reset(seed=1)
    compiled = envs.game.step._cache_size(), envs.game.reset._cache_size()
    for seed in (1, 2):
        again = make(GAME, N)
        _, info = again.reset(seed=seed)
        for _ in range(30):  # with and without ends
            _, _, _, _, info = again.step(focus_fire(info["action_mask"]))
        again.reset()
    assert again.game is envs.game
    assert (again.game.step._cache_size(), again.game.reset._cache_size()) == compiled


@NEEDED
def test_results_stay_as_they_were_and_can_be_written():
    envs = make(GAME, N)
    obs, info = envs.reset(seed=1)
    kept = obs.copy(), info["state"].copy(), info["action_mask"].copy()
    envs.step(focus_fire(info["action_mask"]))
    for array, copy in zip((obs, info["state"], info["action_mask"]), kept):
        np.testing.assert_array_equal(array, copy)
        array[:] = 0


@NEEDED
@pytest.mark.parametrize(
    "env_id, options, text",
    [
        ("smax/3n", {}, "did you mean smax/3m"),
        ("smax/3m", {"steps": 3}, "unexpected keyword argument 'steps'"),
        ("smax/3m?attack_mode=rnadom", {}, "attack_mode must be 'closest' or 'random', not 'rnadom'"),
        ("smax/3m", {"observation_type": "list"}, "'unit_list' or 'conic'"),
        ("smax/3m?num_allies=5", {}, "num_allies is what the scenario says, and no option"),
        ("smax/3m?unit_type_names=['a']", {}, "could not convert string to float"),
        ("smax/3m", {"action_type": "continuous"}, "action_type must be 'discrete', not 'continuous'"),
        ("smax/3m", {"render_mode": "human"}, "render_mode must be None or 'rgb_array'"),
    ],
)
def test_wishes_that_cannot_be_met(env_id, options, text):
    with pytest.raises(EnvError) as caught:
        make(env_id, 1, **options)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@NEEDED
def test_numbers_of_each_type_are_a_list():
    envs = make("smax/3m?unit_type_health=[90,125,160,150,35,80]", 2)
    _, info = envs.reset(seed=1)
    envs.step(focus_fire(info["action_mask"]))
    assert envs.batch[1].state.unit_health.tolist() == [[90] * 6] * 2


@NEEDED
def test_pictures():
    envs = make(GAME, N, render_mode="rgb_array")
    with pytest.raises(EnvError, match="reset"):
        envs.render()
    _, info = envs.reset(seed=1)
    first = envs.render()
    assert first.shape == (400, 400, 3) and first.dtype == np.uint8
    red, blue = (np.argwhere((first[..., a] > 200) & (first[..., b] < 90)) for a, b in ((0, 2), (2, 0)))
    assert blue[:, 1].mean() < 150 < 250 < red[:, 1].mean()  # allies left, enemies right
    envs.step(np.where(info["agent_mask"], 1, 0))  # to the right
    moved = np.argwhere((envs.render()[..., 2] > 200) & (envs.render()[..., 0] < 90))
    assert moved[:, 1].mean() > blue[:, 1].mean() + 5


@NEEDED
def test_trains(tmp_path):
    sizes = {"num_envs": N, "num_steps": 40, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 320}
    folder = ippo.main(ippo.Args(env_id=GAME, runs_dir=str(tmp_path), eval_episodes=0, **sizes))
    assert load_checkpoint(folder)["step"] == 320


@NEEDED
def test_a_second_process_need_not_compile(tmp_path):
    """What the first one compiled is in the user's cache, and no word is said about it. A game would take a minute."""
    script = """
import jax
from cleanmarl.envs.smax import cache_folder

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2)(1.0)
print(events.count("cache_hits"), events.count("cache_misses"), cache_folder())
"""
    env = {key: value for key, value in os.environ.items() if "JAX" not in key} | {"XDG_CACHE_HOME": str(tmp_path)}
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and not done.stderr, done.stderr
        runs.append(done.stdout.split())
    (hits, misses, folder), (hits_then, misses_then, _) = runs
    assert folder.startswith(str(tmp_path)) and list(Path(folder).iterdir())
    assert int(hits) == 0 < int(misses) and int(hits_then) > 0 == int(misses_then)


@NEEDED
def test_list_and_silence(capsys):
    """JaxMARL prints at its import, and would put the standard streams back where a test or a notebook moved them."""
    assert sys.stdout is not sys.__stdout__
    script = "import sys; out = sys.stdout; from cleanmarl.envs import smax; assert sys.stdout is out"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stdout and not done.stderr
    assert {"3m", "2s3z", "3s5z", "5m_vs_6m", "8m", "27m_vs_30m", "smacv2_10_units"} <= set(family.known_names())


def test_missing_package():
    """In an interpreter that cannot find the package, installed here or not."""
    script = "import sys; sys.modules['jaxmarl'] = None; from cleanmarl.envs import make; make('smax/3m')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cleanmarl.envs.EnvError: smax/... needs a package") and last.endswith(family.INSTALLING)


@NEEDED
def test_without_a_seed_each_sequence_of_episodes_goes_on():
    one, other, starts = make(GAME, N), make(GAME, N), []
    for seed in (5, None, None):
        starts.append(one.reset(seed=seed)[0])
        np.testing.assert_array_equal(starts[-1], other.reset(seed=seed)[0])
    assert len(np.unique(np.concatenate(starts), axis=0)) == 3 * N
