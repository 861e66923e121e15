"""SMAClite's battles equal the package stepped by hand, on its own maps and on those described here."""

import json
import subprocess
import sys
from types import SimpleNamespace

from cleanmarl import ippo
from cleanmarl.enjoy import Args as EnjoyArgs
from cleanmarl.enjoy import main as enjoy
from cleanmarl.envs import EnvError, env_seeds, make
from cleanmarl.envs import smaclite as family
from cleanmarl.envs.__main__ import list_ids, original
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optional import needs

NEEDED = needs("smaclite")
SMAC = {  # agents, enemies and time limits, from the table of maps in SMAC's documentation
    **{"3m": (3, 3, 60), "8m": (8, 8, 120), "25m": (25, 25, 150), "5m_vs_6m": (5, 6, 70), "8m_vs_9m": (8, 9, 120)},
    **{"10m_vs_11m": (10, 11, 150), "27m_vs_30m": (27, 30, 180), "MMM": (10, 10, 150), "MMM2": (10, 12, 180)},
    **{"2s3z": (5, 5, 120), "3s5z": (8, 8, 150), "3s5z_vs_3s6z": (8, 9, 170), "3s_vs_3z": (3, 3, 150)},
    **{"3s_vs_4z": (3, 4, 200), "3s_vs_5z": (3, 5, 250), "1c3s5z": (9, 9, 180), "2m_vs_1z": (2, 1, 150)},
    **{"corridor": (6, 24, 400), "6h_vs_8z": (6, 8, 150), "2s_vs_1sc": (2, 1, 300), "so_many_baneling": (7, 32, 100)},
    **{"bane_vs_bane": (24, 24, 200), "2c_vs_64zg": (2, 64, 400)},
}


def random_legal(mask: np.ndarray, rng) -> np.ndarray:
    return (rng.random(mask.shape) * mask).argmax(-1)


def focus_fire(mask: np.ndarray) -> np.ndarray:
    """Everyone shoots the first enemy in range, else stops."""
    return np.where(mask[..., 6:].any(-1), 6 + mask[..., 6:].argmax(-1), mask[..., 1])


def play(env_id: str, num_envs: int, steps: int, seed: int = 5, policy=None, **options) -> list:
    """[(obs, info)] + [(action, obs, reward, termination, truncation, info), ...]; without a policy, at random."""
    envs, rng = make(env_id, num_envs, **options), np.random.default_rng(0)
    assert envs.team_reward and envs.may_die
    record = [envs.reset(seed=seed)]
    for _ in range(steps):
        mask = record[-1][-1]["action_mask"]
        action = policy(mask) if policy else random_legal(mask, rng)
        record.append((action, *envs.step(action)))
    envs.close()
    return record


def fresh(name: str, tmp_path):
    """The package's own environment, on a map of its own or on ours through its map files."""
    from smaclite.env import SMACliteEnv

    if name not in family.MAPS:
        return SMACliteEnv(**gym.spec(f"smaclite/{name}-v0").kwargs)
    (tmp_path / "map.json").write_text(json.dumps(family.describe(name, str(tmp_path))))
    return SMACliteEnv(map_file=str(tmp_path / "map.json"))


@NEEDED
@pytest.mark.parametrize(
    "name, num_workers, steps, policy",
    [
        ("2s3z", 2, 60, None),
        ("3m", 0, 60, focus_fire),
        ("MMM", 1, 30, None),
        ("so_many_baneling", 0, 20, None),
        ("1c3s5z", 1, 150, None),
    ],
)
def test_equals_the_package(name, num_workers, steps, policy, tmp_path):
    N, limit = 2, 24 if name == "2s3z" else SMAC[name][2]
    record = play(f"smaclite/{name}", N, steps, policy=policy, num_workers=num_workers, max_steps=limit)
    ends = deaths = 0
    for n, seed in enumerate(env_seeds(5, N)):
        rng, env = np.random.default_rng(seed), fresh(name, tmp_path)
        A = env.n_agents
        obs, _ = env.reset(seed=seed)
        alive, returns, length = np.ones(A, bool), np.zeros(A), 0

        def seen(obs, env, obs_, state, mask, n=n):
            np.testing.assert_array_equal(obs_[n], np.stack(obs))
            np.testing.assert_array_equal(state[n], env.get_state())
            np.testing.assert_array_equal(mask[n], np.stack(env.get_avail_actions()).astype(bool))

        seen(obs, env, record[0][0], record[0][1]["state"], record[0][1]["action_mask"])
        for action, obs_, reward_, termination, truncation, info in record[1:]:
            obs, reward, done, _, its_info = env.step(action[n].tolist())
            np.testing.assert_array_equal(reward_[n], np.float32(reward) * alive)
            returns, length = returns + reward_[n], length + 1
            cut = length == limit and not done
            assert (termination[n], truncation[n]) == (done, cut)
            if done or cut:
                seen(obs, env, info["final_obs"], info["final_state"], info["final_action_mask"])
                np.testing.assert_allclose(info["episode"]["r"][n], returns)
                assert info["episode"]["l"][n] == length
                assert info["episode"]["battle_won"][n] == its_info["battle_won"]
                ends += 1
                env = fresh(name, tmp_path)  # nothing of an episode may show in the next
                obs, _ = env.reset(seed=int(rng.integers(2**31)))
                alive, returns, length = np.ones(A, bool), np.zeros(A), 0
            else:
                alive = np.array([a in env.agents for a in range(A)])
                deaths += A - alive.sum()
            np.testing.assert_array_equal(info["agent_mask"][n], alive)
            seen(obs, env, obs_, info["state"], info["action_mask"])
    assert ends >= (0 if name == "MMM" else N) and (deaths or name == "MMM")


@NEEDED
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_neighbours_are_those_of_the_package(data):
    from smaclite.env.rvo2.neighbour_finder import ALL_PLANES, NeighbourFinder

    num_units = data.draw(st.integers(0, 60))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))

    def unit(plane, valid_targets, pos):
        return SimpleNamespace(plane=plane, valid_targets=valid_targets, pos=pos)

    planes = sorted(ALL_PLANES, key=lambda plane: plane.name)[: data.draw(st.integers(1, 3))]
    grid = rng.integers(0, 8, (num_units, 2)).astype(np.float32)  # with distances that are a radius to the last bit
    places = grid if data.draw(st.booleans()) else rng.uniform(0, 32, (num_units, 2)).astype(np.float32)
    units = [unit(planes[rng.integers(len(planes))], set(rng.choice(planes, 1)), pos) for pos in places]
    mode = {key: data.draw(st.booleans()) for key in ("return_distance", "same_plane_only")}
    mode["targetting_mode"] = not mode["same_plane_only"] and data.draw(st.booleans())
    # where it is told of targets the package takes one unit's radius for another's, if they differ
    radius = 5 if mode["targetting_mode"] else rng.integers(1, 10, num_units).tolist()
    ours, theirs = family.Neighbours(ALL_PLANES), NeighbourFinder()
    armies = dict(enumerate(units)), dict(enumerate(units))
    for finder, army in zip((ours, theirs), armies):
        finder.set_all_units(army)
    for each in units:
        each.pos += 1  # until the next update the others are where they were
    assert ours.query_radius(units, radius, **mode) == theirs.query_radius(units, radius, **mode)
    for dead in (range(0, num_units, 2), range(1, num_units, 2)):  # half of them, then all
        for finder, army in zip((ours, theirs), armies):
            for i in dead:
                del army[i]
            finder.update()
        assert ours.query_radius(units, radius, **mode) == theirs.query_radius(units, radius, **mode)


@NEEDED
def test_distances_are_those_of_the_package_to_the_last_digit():
    """Of 250,000 pairs, since x**2 is not x * x in few of them."""
    from smaclite.env.rvo2.neighbour_finder import ALL_PLANES, NeighbourFinder

    rng, plane = np.random.default_rng(1), min(ALL_PLANES, key=str)
    ours, theirs = family.Neighbours(ALL_PLANES), NeighbourFinder()
    for _ in range(100):
        places = rng.uniform(0, 32, (50, 2)).astype(np.float32)
        units = [SimpleNamespace(plane=plane, pos=pos) for pos in places]
        for finder in (ours, theirs):
            finder.set_all_units(dict(enumerate(units)))
        assert ours.query_radius(units, 50, True) == theirs.query_radius(units, 50, True)


@NEEDED
@pytest.mark.parametrize("name", SMAC)
def test_maps_are_those_of_smac(name):
    env = family.parallel_env(name)
    assert (env.env.n_agents, env.env.n_enemies, env.max_steps) == SMAC[name]
    env.reset(seed=1)
    for units in (env.env.agents.values(), env.env.enemies.values()):
        spots = np.array([unit.pos for unit in units])
        radius = np.array([unit.radius for unit in units])
        away = np.linalg.norm(spots[:, None] - spots[None], axis=-1) + 9 * np.eye(len(spots))
        assert (away > (radius[:, None] + radius) - 0.01).all()  # nobody starts inside another
        ground = [env.env.map_info.terrain[int(y)][int(x)].value for x, y in spots]
        assert name not in family.MAPS or set(ground) == {"_"}


@NEEDED
def test_descriptions_are_like_those_of_the_package(tmp_path, monkeypatch):
    from smaclite.env.maps.map import MapInfo, MapPreset

    theirs = {preset.value.name: preset.value for preset in MapPreset}
    for name, allies, enemies, terrain in [
        ("2s3z", {"STALKER": 2, "ZEALOT": 3}, {"STALKER": 2, "ZEALOT": 3}, "SIMPLE"),
        ("10m_vs_11m", {"MARINE": 10}, {"MARINE": 11}, "SIMPLE"),
        ("3s_vs_5z", {"STALKER": 3}, {"ZEALOT": 5}, "ALL_GREEN"),
    ]:
        monkeypatch.setitem(family.MAPS, name, (allies, enemies, terrain))
        (tmp_path / "map.json").write_text(json.dumps(family.describe(name, str(tmp_path))))
        ours = MapInfo.from_file(tmp_path / "map.json")
        for field in ("name", "num_allied_units", "num_enemy_units", "groups", "attack_point", "terrain"):
            assert getattr(ours, field) == getattr(theirs[name], field), field
        for field in ("ally_has_shields", "enemy_has_shields", "width", "height", "num_unit_types"):
            assert getattr(ours, field) == getattr(theirs[name], field), field
        assert (ours.unit_type_ids or None) == theirs[name].unit_type_ids


@NEEDED
def test_a_map_of_ones_own_is_won(tmp_path):
    """battle_won and the whole reward of 20; `custom` takes the package's map files."""
    family_map = {**family.describe("3s_vs_3z", str(tmp_path)), "num_allied_units": 6, "num_enemy_units": 1}
    family_map["groups"][0]["units"], family_map["groups"][1]["units"] = {"STALKER": 6}, {"MARINE": 1}
    family_map["enemy_has_shields"] = False
    (tmp_path / "my_map.json").write_text(json.dumps(family_map))
    record = play(f"smaclite/custom?map_file={tmp_path}/my_map.json", 2, 40, policy=focus_fire, num_workers=0)
    ends = [row for row in record[1:] if row[3].any()]
    assert ends
    for _, _, reward, termination, _, info in ends:
        won = info["episode"]["battle_won"]
        assert won[termination].all() and not won[~termination].any()
        np.testing.assert_allclose(info["episode"]["r"][termination], 20, rtol=0.2)  # shields grow again
        assert (reward[termination] > 10).all() and not info["final_obs"][~termination].any()


@NEEDED
def test_time_limit():
    record = play("smaclite/8m", 1, 6, num_workers=0, max_steps=3)
    assert [row[4].tolist() for row in record[1:]] == [[False], [False], [True]] * 2
    assert not any(row[3].any() for row in record[1:])
    info = record[3][-1]
    assert info["episode"]["l"].tolist() == [3] and not info["episode"]["battle_won"].any()
    assert info["final_obs"].any() and not np.array_equal(info["final_state"], info["state"])


@NEEDED
def test_medivacs_heal_every_ally():
    """Also the last one, whom the package's own action space leaves out."""
    envs = make("smaclite/MMM", 1, num_workers=0)
    _, info = envs.reset(seed=1)
    assert envs.action_sizes.tolist() == [16] * 10 and info["action_mask"][0, 0, 15]
    action = np.ones((1, 10), np.int64)
    action[0, 0] = 15
    envs.step(action)


@NEEDED
def test_seeds_whatever_the_workers():
    """In 8m under fire the order of the units, which is all that the seed decides, shows after 19 steps."""
    records = [play("smaclite/8m", n, 22, num_workers=w, policy=focus_fire) for n, w in [(4, 0), (4, 2), (1, 1)]]
    a, b, c = (np.stack([row[-1]["state"] for row in record]) for record in records)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a[:, :1], c)
    assert (a[:, 1:] != a[:, :1]).any()


@NEEDED
def test_errors_and_silence(capsys):
    for env_id, options, text in [
        ("smaclite/3n", {}, "did you mean smaclite/3m"),
        ("smaclite/MMM3", {}, "did you mean smaclite/MMM"),
        ("smaclite/3m?max_step=5", {}, "smaclite/3m has no option 'max_step'; it has max_steps, map_file"),
        ("smaclite/3m", {"max_steps": 0}, "max_steps must be an integer of at least 1, not 0"),
        ("smaclite/custom", {}, "map_file must be provided"),
        ("smaclite/custom", {"map_file": "no_such.json"}, "No such file"),
    ]:
        with pytest.raises(EnvError) as caught:
            make(env_id, 1, **options)
        assert text in str(caught.value) and "\n" not in str(caught.value)
    make("smaclite/3m", 1, num_workers=0).reset(seed=1)
    done = capsys.readouterr()
    assert not done.out and not done.err


@NEEDED
def test_pictures():
    envs = make("smaclite/3m", 1, num_workers=1, render_mode="rgb_array")
    envs.reset(seed=1)
    first = envs.render()
    assert first.shape == (1024, 1024, 3) and first.dtype == np.uint8 and first.std() > 0
    envs.step(np.array([[2, 2, 2]]))
    assert (envs.render() != first).any()
    envs.close()


@NEEDED
def test_trains_and_plays(tmp_path, capsys):
    sizes = {"num_envs": 2, "num_steps": 25, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 100}
    folder = ippo.main(ippo.Args(env_id="smaclite/3m?max_steps=20", runs_dir=str(tmp_path), eval_episodes=2, **sizes))
    assert load_checkpoint(folder)["step"] == 100
    enjoy(EnjoyArgs(folder, episodes=2, greedy=True))
    assert "battle_won" in capsys.readouterr().out


@NEEDED
def test_list_and_the_original(capsys):
    list_ids("smaclite")
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["smaclite/3m"] == ["3", "30", "9", "48", "yes", "workers"] and set(SMAC) <= {r[9:] for r in rows}
    steps = original("smaclite", "3m")
    assert all(next(steps) > 0 for _ in range(3))


def test_missing_package():
    """In an interpreter that cannot find the package, installed here or not."""
    script = "import sys; sys.modules['smaclite'] = None; from cleanmarl.envs import make; make('smaclite/3m')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cleanmarl.envs.EnvError: smaclite/... needs a package") and last.endswith(family.INSTALLING)
