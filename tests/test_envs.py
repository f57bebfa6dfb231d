"""The environments: contexts, seeds, rewards and parameters, each against an independent computation."""

import pickle
from itertools import product

import gymnasium as gym
import metaworld
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import envs
import envs.manipulation
from envs.manipulation import TASKS

RIGHT, UP, LEFT, DOWN = range(4)
TMAZES = ["tmaze-passive", "tmaze-active"]
LOCOMOTION = ["ant-dir", "cheetah-vel", "walker-param", "hopper-param"]
CONTEXT_SIZE = {
    "tmaze-passive": 1,
    "tmaze-active": 1,
    "point-robot": 2,
    "ant-dir": 2,
    "cheetah-vel": 1,
    "walker-param": 65,
    "hopper-param": 41,
    "ml10": 2,
    "ml10-appendix": 2,
}
MAX_STEPS = {"point-robot": 50, "ml10": 300, "ml10-appendix": 300} | {name: 200 for name in LOCOMOTION}


def episode(env, actions, **reset):
    """Observations, rewards and infos of one episode under these actions, as one list of plain numbers and arrays."""
    observation, info = env.reset(**reset)
    trace = [(observation, 0.0, info)]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        trace.append((observation, reward, info))
        if terminated or truncated:
            break
    return trace


def assert_same(trace, other):
    assert len(trace) == len(other)
    for (observation, reward, info), (observation_, reward_, info_) in zip(trace, other):
        np.testing.assert_array_equal(observation, observation_)
        assert reward == reward_
        assert info.keys() == info_.keys()
        for key in info:
            np.testing.assert_array_equal(info[key], info_[key])


def sampled_actions(env, count, seed=0):
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


# ---------------------------------------------------------------------------------------------- every environment


def test_ids_are_registered():
    assert sorted(envs.IDS) == sorted(CONTEXT_SIZE)
    for name, steps in MAX_STEPS.items():
        assert gym.spec(name).max_episode_steps == steps


@pytest.mark.filterwarnings("ignore:.*Box observation space .*infinity")
@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_check_env(name):
    # T-Maze's pictures are checked too; a MuJoCo window would need a display.
    check_env(gym.make(name).unwrapped, skip_render_check=not name.startswith(("tmaze", "point")))


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_same_seed_gives_the_same_episodes_to_the_bit_whatever_came_before(name):
    first, second = gym.make(name), gym.make(name)
    actions = sampled_actions(first, 40)
    episode(second, sampled_actions(second, 15, seed=1), seed=99)  # leaves a used simulator behind
    second.reset()
    assert_same(episode(first, actions, seed=5), episode(second, actions, seed=5))
    assert_same(episode(first, actions), episode(second, actions))  # the unseeded episode after it
    first_context = episode(first, actions, seed=5)[0][2]["context"]
    others = [first.reset(seed=s)[1]["context"] for s in range(10, 18)]
    assert any(not np.array_equal(first_context, c) for c in others)


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_context_is_new_at_every_reset_and_in_every_info(name):
    env = gym.make(name)
    contexts = [env.reset(seed=7)[1]["context"]] + [env.reset()[1]["context"] for _ in range(20)]
    assert len({tuple(c) for c in contexts}) > 1
    context = contexts[-1].copy()
    contexts[-1][:] = 1e9
    assert context.shape == (CONTEXT_SIZE[name],) and context.dtype == np.float64
    for action in sampled_actions(env, 15):
        *_, info = env.step(action)
        np.testing.assert_array_equal(info["context"], context)
        info["context"][:] = 1e9  # a caller's scribble must not reach the environment


@pytest.mark.parametrize("name", ["point-robot", "ant-dir", "cheetah-vel", "walker-param", "hopper-param"])
def test_start_state_does_not_depend_on_the_context(name):
    """With the observation at t = 0 the same for every context, nothing of the context can be in it (paper, Eq. 4)."""
    env = gym.make(name)
    drawn = env.reset(seed=11)[1]["context"]
    fixed = np.roll(drawn, 1) if drawn.size > 1 else drawn + 0.5
    plain, _ = env.reset(seed=11)
    other, info = env.reset(seed=11, options={"context": fixed})
    np.testing.assert_array_equal(info["context"], fixed)
    np.testing.assert_array_equal(plain, other)
    given = fixed.copy()
    env.reset(seed=11, options={"context": given})
    given[:] = 1e9  # the caller's array is not the environment's
    np.testing.assert_array_equal(env.step(env.action_space.sample())[-1]["context"], fixed)
    following = env.reset()[1]["context"]
    env.reset(seed=11)
    np.testing.assert_array_equal(env.reset()[1]["context"], following)  # nor does fixing one change the next


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_a_context_of_the_wrong_shape_or_kind_is_refused_in_one_line(name):
    env = gym.make(name)
    for bad in (np.zeros(CONTEXT_SIZE[name] + 1), "left", np.full(CONTEXT_SIZE[name], np.nan), None):
        with pytest.raises(ValueError, match="the context must be") as error:
            env.reset(options={"context": bad})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, bad", [("tmaze-passive", [0.5]), ("ant-dir", [1.0, 1.0]), ("ml10", [10, 0])])
def test_a_context_outside_its_range_is_refused(name, bad):
    with pytest.raises(ValueError, match="the context must be"):
        gym.make(name).reset(options={"context": bad})


def test_an_unknown_id_is_answered_with_ours():
    for unknown in ("ant-direction", "Nope-v0", "no such thing"):
        with pytest.raises(
            ValueError, match="unknown environment.*ant-dir.*tmaze-passive|tmaze-passive.*ant-dir"
        ) as error:
            envs.make_vec(unknown, 2)
        assert "\n" not in str(error.value)


def test_make_vec_tells_the_longest_episode_and_resets_on_the_same_step():
    for name, steps in MAX_STEPS.items():
        if name.startswith("ml10"):
            continue
        vec, longest = envs.make_vec(name, 2)
        assert longest == steps and vec.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert envs.make_vec("tmaze-passive", 2, corridor_length=7)[1] == 8
    with pytest.raises(ValueError, match="unknown environment"):
        envs.make_vec("no_such_module:ant-dir", 2)
    assert envs.make_vec("tmaze-active", 2, corridor_length=7)[1] == 9
    for name in ("point-robot", "cheetah-vel"):
        vec, longest = envs.make_vec(name, 2, max_episode_steps=9)
        vec.reset(seed=0)
        ends = [vec.step(vec.action_space.sample())[3].tolist() for _ in range(longest)]
        assert longest == 9 and ends == [[False, False]] * 8 + [[True, True]]
    vec, _ = envs.make_vec("cheetah-vel", 2, asynchronous=True, velocity_range=(2.0, 2.0))
    assert isinstance(vec, gym.vector.AsyncVectorEnv) and (vec.reset()[1]["context"] == 2).all()
    vec.close()
    with pytest.raises(ValueError, match="--corridor-length"):
        envs.make_vec("tmaze-passive", 2, max_episode_steps=5)
    assert envs.make_vec("envs.point:point-robot", 2)[1] == 50  # module:Id imports the module first
    vec, longest = envs.make_vec("CartPole-v1", 2)  # has a native vector of another mode, which must not be used
    assert longest == 500 and vec.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    gym.register("endless", entry_point="envs.point:PointRobot")
    with pytest.raises(ValueError, match="--max-episode-steps"):
        envs.make_vec("endless", 2)
    assert envs.make_vec("endless", 2, max_episode_steps=6)[1] == 6


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_vectors_seed_their_environments_apart(name, mode):
    """Environment i of a vector is the environment seeded with seed + i, in this process or in another."""
    vec = gym.make_vec(name, num_envs=3, vectorization_mode=mode)
    try:
        observations, infos = vec.reset(seed=20)
        vec.action_space.seed(0)
        actions = vec.action_space.sample()
        next_observations, rewards, _, _, next_infos = vec.step(actions)
        contexts = {tuple(context) for context in infos["context"]}
        assert len(contexts) == 3 or name.startswith("tmaze")  # a T-Maze has two contexts
        for i in range(3):
            env = gym.make(name)
            observation, info = env.reset(seed=20 + i)
            next_observation, reward, _, _, next_info = env.step(actions[i])
            np.testing.assert_array_equal(observation, observations[i])
            np.testing.assert_array_equal(info["context"], infos["context"][i])
            np.testing.assert_array_equal(next_observation, next_observations[i])
            np.testing.assert_array_equal(next_info["context"], next_infos["context"][i])
            assert reward == rewards[i]
        fixed = infos["context"][0]
        _, infos = vec.reset(options={"context": fixed})
        np.testing.assert_array_equal(infos["context"], np.tile(fixed, (3, 1)))
    finally:
        vec.close()


@pytest.mark.parametrize("name", TMAZES)
def test_tmaze_contexts_of_a_vector_are_drawn_apart(name):
    for mode in ("sync", "vector_entry_point"):
        goals = gym.make_vec(name, num_envs=64, vectorization_mode=mode).reset(seed=0)[1]["context"]
        assert 16 < (goals == 1).sum() < 48 and set(goals.ravel()) == {1.0, -1.0}


@pytest.mark.parametrize("name, kwargs", [(t, {"corridor_length": 5}) for t in TMAZES] + [("point-robot", {})])
def test_native_vector_equals_a_sync_vector_step_for_step(name, kwargs):
    """Observations, rewards, ends, infos and final infos, over 1,000 and more random episodes."""
    native = gym.make_vec(name, num_envs=16, vectorization_mode="vector_entry_point", **kwargs)
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    sync = gym.make_vec(name, num_envs=16, vectorization_mode="sync", vector_kwargs=same_step, **kwargs)
    assert native.single_observation_space == sync.single_observation_space
    assert native.single_action_space == sync.single_action_space

    def compare(a, b):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, np.ndarray) and a.dtype == object:
            assert a.shape == b.shape
            for x, y in zip(a, b):
                compare(x, y)
        else:
            np.testing.assert_array_equal(a, b)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)

    for seed in (3, [5] * 8 + [None] * 8):
        for a, b in zip(native.reset(seed=seed), sync.reset(seed=seed)):
            compare(a, b)
    native.reset()[1]["context"][:] = 1e9
    sync.reset()
    sync.action_space.seed(1)
    episodes, arrays_returned = 0, []
    while episodes < 1000:
        actions = sync.action_space.sample()
        if name.startswith("tmaze"):  # drift to the right, so that goals and horizons are both reached
            actions = np.where(np.random.default_rng(episodes).random(16) < 0.5, RIGHT, actions)
        ours, theirs = native.step(actions), sync.step(actions)
        for a, b in zip(ours, theirs):
            compare(a, b)
        arrays_returned.append((ours[0], ours[0].copy()))
        episodes += int((ours[2] | ours[3]).sum())
    for array, copy in arrays_returned[-50:]:  # what was returned is never written again
        np.testing.assert_array_equal(array, copy)


def test_native_vector_takes_a_list_of_seeds_and_a_fixed_context():
    vec = gym.make_vec("point-robot", num_envs=3)
    _, infos = vec.reset(seed=[4, 5, 4])
    np.testing.assert_array_equal(infos["context"][0], infos["context"][2])
    assert not np.array_equal(infos["context"][0], infos["context"][1])
    _, infos = vec.reset(options={"context": [0.6, 0.8]})
    np.testing.assert_array_equal(infos["context"], np.tile([0.6, 0.8], (3, 1)))
    assert gym.make_vec("point-robot", num_envs=2).np_random[1].random() != vec.np_random[1].random()
    with pytest.raises(ValueError, match='"sync" to render'):
        gym.make_vec("tmaze-passive", num_envs=2, render_mode="rgb_array")
    with pytest.raises(ValueError, match="3 of them"):
        vec.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="the context must be"):
        gym.make_vec("tmaze-passive", num_envs=2).reset(options={"context": [0.0]})


# --------------------------------------------------------------------------------------------------------- T-Maze


def tmaze_return(name, length, policy, goal, **reset):
    """The undiscounted return of policy(t, observation) in a maze whose goal is on this side."""
    env = gym.make(name, corridor_length=length)
    observation, _ = env.reset(options={"context": [goal]}, **reset)
    rewards, terminated = [], False
    while not terminated:
        observation, reward, terminated, truncated, _ = env.step(policy(len(rewards), observation))
        rewards.append(reward)
        assert not truncated, "the horizon terminates"
    return sum(rewards), len(rewards)


@pytest.mark.parametrize("length", [2, 3, 20, 49, 200, 600])
@pytest.mark.parametrize("goal", [1, -1])
def test_tmaze_best_policies(length, goal):
    turn = UP if goal == 1 else DOWN
    passive = tmaze_return("tmaze-passive", length, lambda t, _: RIGHT if t < length else turn, goal)
    assert passive == (1.0, length + 1)

    def look_first(t, _):
        return LEFT if t == 0 else RIGHT if t < length + 1 else turn

    assert tmaze_return("tmaze-active", length, look_first, goal) == (1.0, length + 2)
    env = gym.make("tmaze-passive", corridor_length=length)
    env.reset(options={"context": [goal]})
    rewards = [env.step(UP)[1] for _ in range(length + 1)]
    assert rewards == [-1 / length] * length + [0.0], "never leaving the start costs exactly L times 1/L"


@pytest.mark.parametrize("name", TMAZES)
def test_tmaze_best_markovian_policy_gets_exactly_half(name):
    """By brute force at L = 2: every deterministic map from what is observed to an action, averaged over the goals
    (and, in active, over the cue that the start shows). A random one does no better: its choice at the junction cannot
    depend on the goal, so it is right with probability p under one goal and 1 - p under the other, 1/2 on average."""
    length, best = 2, -np.inf
    cells = [(cell, cue) for cell in range(length) for cue in ((-1, 1) if cell == 0 else (0,))] + [(length, 0)]
    if name == "tmaze-active":
        cells += [(1, -1), (1, 1)]  # the start's own cue
    start_cues = {1: [], -1: []}  # seeds by the cue that the start shows
    for seed in range(20):
        start_cues[int(gym.make(name, corridor_length=length).reset(seed=seed)[0][2])].append(seed)
    seeds = [start_cues[1][0], start_cues[-1][0]]
    for actions in product(range(4), repeat=len(cells)):
        table = dict(zip(cells, actions))

        def policy(_, observation):
            return table[round(float(observation[0]) * length**0.5) + length, int(observation[2])]

        returns = [tmaze_return(name, length, policy, goal, seed=s)[0] for goal in (1, -1) for s in seeds]
        best = max(best, np.mean(returns))
    assert best == 0.5


def test_tmaze_active_start_is_blocked_free_and_uninformative():
    env = gym.make("tmaze-active", corridor_length=4)
    cues = {goal: [env.reset(seed=s, options={"context": [goal]})[0][2] for s in range(200)] for goal in (1, -1)}
    assert cues[1] == cues[-1], "the start's cue does not depend on the goal"
    assert 70 < cues[1].count(1.0) < 130
    assert cues[1] == [env.reset(seed=s)[0][2] for s in range(200)], "nor on whether the goal was drawn or given"
    start, _ = env.reset(seed=0)
    after, reward, *_ = env.step(RIGHT)
    assert after[0] == start[0] == np.float32(-3 / 2) and after[2] == 0 and reward == 0
    assert env.step(RIGHT)[0][0] == np.float32(-2 / 2), "blocked at the first step alone"
    env.reset(seed=0, options={"context": [-1]})
    for _ in range(2):  # the oracle tells the truth at every visit
        observation, *_ = env.step(LEFT)
        assert observation[2] == -1
        env.step(RIGHT)


def test_tmaze_passive_rewards_and_observations_by_hand():
    env = gym.make("tmaze-passive", corridor_length=4)
    observation, _ = env.reset(options={"context": [1]})
    np.testing.assert_array_equal(observation, np.float32([-4 / 2, 0, 1]))
    steps = [  # action, observation (x, y, cue), reward
        (LEFT, (-2.0, 0, 1), -1 / 4),  # into the wall: stands still
        (RIGHT, (-1.5, 0, 0), 0.0),
        (LEFT, (-2.0, 0, 1), -2 / 4),
        (UP, (-2.0, 0, 1), -1 / 4),
        (RIGHT, (-1.5, 0, 0), 0.0),  # the fifth step is the horizon's: terminates, without cost
    ]
    for n, (action, expected, reward) in enumerate(steps):
        observation, got, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(observation, np.float32(expected))
        assert (got, terminated, truncated) == (reward, n == 4, False)
    env.reset(options={"context": [1]})
    for _ in range(4):
        assert env.step(RIGHT)[1] == 0
    observation, reward, terminated, *_ = env.step(DOWN)
    assert (reward, terminated, observation[1]) == (0.0, True, -1.0), "the wrong goal ends the episode for nothing"


@pytest.mark.parametrize("name", TMAZES)
@pytest.mark.parametrize("length", [1, 0, -3, 2.5, 3.0, np.nan, "5"])
def test_tmaze_refuses_a_short_corridor_in_one_line(name, length):
    for make in (
        lambda: gym.make(name, corridor_length=length),
        lambda: envs.make_vec(name, 2, corridor_length=length),
    ):
        with pytest.raises(ValueError, match="corridor length must be a whole number, 2 or more") as error:
            make()
        assert "\n" not in str(error.value)


def test_tmaze_ansi_shows_agent_oracle_and_true_goal():
    env = gym.make("tmaze-passive", corridor_length=4, render_mode="ansi")
    env.reset(options={"context": [-1]})
    assert env.render().splitlines() == ["    x", "A---+", "    G", "step 0 of 5, cue -1"]
    env.step(RIGHT)
    assert env.render().splitlines() == ["    x", "OA--+", "    G", "step 1 of 5, cue +0"]
    for action in (RIGHT, RIGHT, RIGHT, DOWN):
        env.step(action)
    assert env.render().splitlines()[:3] == ["    x", "O---+", "    A"]


@pytest.mark.parametrize("length", [2, 20, 600])
def test_tmaze_picture_shows_agent_oracle_cue_and_true_goal(length):
    env = gym.make("tmaze-passive", corridor_length=length, render_mode="rgb_array")
    colours = {"oracle": (60, 120, 216), "goal": (60, 170, 90), "other": (110, 110, 110), "agent": (240, 150, 40)}
    places = {}
    for goal in (1, -1):
        env.reset(options={"context": [goal]})
        start = env.render()
        for _ in range(length):
            env.step(RIGHT)
        image = env.render()
        assert image.dtype == np.uint8 and image.shape[0] % 2 == image.shape[1] % 2 == 0 and image.shape[1] < 1600
        where = {name: np.argwhere((image == colour).all(-1)) for name, colour in colours.items()}
        places[goal] = {name: pixels.mean(0) for name, pixels in where.items()}
        assert all(len(pixels) > 500 for pixels in where.values())
        before = np.argwhere((start == colours["agent"]).all(-1)).mean(0)
        assert places[goal]["agent"][1] > before[1] + 50, "the agent went right"
        cue = np.argwhere((start == 255).all(-1))  # the arrow is wide at its base and points to the goal
        assert len(cue) > 50 and not (image == 255).all(-1).any()
        upper, lower = (cue[:, 0] <= c for c in np.quantile(cue[:, 0], [0.25, 0.75]))
        spread = [np.ptp(cue[upper, 1]), np.ptp(cue[~lower, 1])]
        assert (spread[0] < spread[1]) == (goal == 1)
    assert places[1]["goal"][0] < places[1]["agent"][0] < places[-1]["goal"][0]
    np.testing.assert_allclose(places[1]["other"], places[-1]["goal"])


# ---------------------------------------------------------------------------------------------------- point robot


def test_point_robot_picture_shows_point_and_goal():
    env = gym.make("point-robot", render_mode="rgb_array")
    env.reset(options={"context": [0.0, 1.0]})
    for _ in range(5):
        env.step(np.array([1.0, 0.0], dtype=np.float32))
    image = env.render()
    goal = np.argwhere((image == (60, 170, 90)).all(-1)).mean(0)
    point = np.argwhere((image == (240, 150, 40)).all(-1)).mean(0)
    np.testing.assert_allclose(goal, [40, 120], atol=2)  # (row, column): 80 pixels a unit, the origin in the middle
    np.testing.assert_allclose(point, [120, 160], atol=2)


def test_point_robot_moves_and_pays_as_defined():
    env = gym.make("point-robot")
    observation, _ = env.reset(seed=0, options={"context": [0.0, -1.0]})
    np.testing.assert_array_equal(observation, [0, 0])
    observation, reward, *_ = env.step(np.array([1.0, -0.5], dtype=np.float32))
    np.testing.assert_allclose(observation, [0.1, -0.05], rtol=1e-6)
    assert reward == pytest.approx(-np.hypot(0.1, 0.95))
    observation, *_ = env.step(np.array([30.0, 0.0], dtype=np.float32))
    np.testing.assert_allclose(observation, [0.2, -0.05], rtol=1e-6)  # the action is clipped to its box
    goals = np.array([env.reset(seed=s)[1]["context"] for s in range(2000)])
    np.testing.assert_allclose(np.linalg.norm(goals, axis=1), 1)
    assert np.abs(goals.mean(0)).max() < 0.06, "all around the circle"


# ----------------------------------------------------------------------------------------------------- locomotion


def test_locomotion_differs_from_its_parent_in_nothing_else():
    """From the same state and with the same actions: same observations, ends and info; contexts neutral."""
    neutral = {"walker-param": np.ones(65), "hopper-param": np.ones(41), "ant-dir": [1.0, 0.0], "cheetah-vel": [1.0]}
    parents = {
        "ant-dir": "Ant-v5",
        "cheetah-vel": "HalfCheetah-v5",
        "walker-param": "Walker2d-v5",
        "hopper-param": "Hopper-v5",
    }
    for name, parent in parents.items():
        ours, theirs = gym.make(name), gym.make(parent)
        assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
        ours.reset(seed=0, options={"context": neutral[name]})
        theirs.reset(seed=1)
        theirs.unwrapped.set_state(ours.unwrapped.data.qpos, ours.unwrapped.data.qvel)
        for action in sampled_actions(ours, 30):
            observation, reward, terminated, _, info = ours.step(action)
            observation_, reward_, terminated_, _, info_ = theirs.step(action)
            np.testing.assert_allclose(observation, observation_, rtol=0, atol=1e-9)
            assert terminated == terminated_
            info.pop("context")
            assert info.keys() == info_.keys()
            if name != "cheetah-vel":
                assert reward == pytest.approx(reward_, abs=1e-9)
                for key in info:
                    assert info[key] == pytest.approx(info_[key], abs=1e-9)
            if terminated:
                break


def test_ant_dir_reward_from_positions_before_and_after():
    env = gym.make("ant-dir")
    for seed in range(5):
        _, info = env.reset(seed=seed)
        direction, model = info["context"], env.unwrapped
        assert np.linalg.norm(direction) == pytest.approx(1)
        for action in sampled_actions(env, 40, seed):
            before = model.data.xpos[1, :2].copy()
            _, reward, terminated, _, info = env.step(action)
            velocity = (model.data.xpos[1, :2] - before) / (5 * 0.01)
            height = model.data.qpos[2]
            parts = {
                "reward_forward": velocity @ direction,
                "reward_survive": float(0.2 <= height <= 1.0),
                "reward_ctrl": -0.5 * (action.astype(np.float64) ** 2).sum(),
                "reward_contact": -5e-4 * (np.clip(model.data.cfrc_ext, -1, 1) ** 2).sum(),
            }
            for key, value in parts.items():
                assert info[key] == pytest.approx(value, abs=1e-6), key
            assert reward == pytest.approx(sum(parts.values()), abs=1e-6)
            if terminated:
                break
    angles = [np.arctan2(*env.reset(seed=s)[1]["context"]) for s in range(300)]
    assert np.abs([np.mean(np.cos(angles)), np.mean(np.sin(angles))]).max() < 0.15, "all around the circle"


def test_cheetah_vel_reward_from_positions_before_and_after():
    env = gym.make("cheetah-vel")
    for seed in range(5):
        _, info = env.reset(seed=seed)
        target = info["context"][0]
        for action in sampled_actions(env, 40, seed):
            before = env.unwrapped.data.qpos[0]
            _, reward, terminated, _, info = env.step(action)
            velocity = (env.unwrapped.data.qpos[0] - before) / (5 * 0.01)
            control = -0.05 * (action.astype(np.float64) ** 2).sum()
            assert info["reward_forward"] == pytest.approx(-abs(velocity - target), abs=1e-6)
            assert info["reward_ctrl"] == pytest.approx(control, abs=1e-6)
            assert reward == pytest.approx(-abs(velocity - target) + control, abs=1e-6)
            assert not terminated
    targets = [env.reset(seed=s)[1]["context"][0] for s in range(300)]
    assert 0 <= min(targets) < 0.1 and 2.9 < max(targets) <= 3 and 1.3 < np.mean(targets) < 1.7


@pytest.mark.parametrize("name, size", [("walker-param", 65), ("hopper-param", 41)])
def test_parameters_after_200_resets_are_nominal_times_multiplier(name, size):
    env = gym.make(name)
    model = env.unwrapped.model
    names = ["body_mass", "body_inertia", "dof_damping", "geom_friction"]
    parent = gym.make({"walker-param": "Walker2d-v5", "hopper-param": "Hopper-v5"}[name]).unwrapped.model
    nominal = np.concatenate([getattr(parent, n).ravel() for n in names])
    assert nominal.size == size
    fixed = {
        n: getattr(parent, n).copy() for n in ("geom_size", "body_pos", "jnt_range", "actuator_gear", "dof_armature")
    }
    draws = []
    for n in range(200):
        _, info = env.reset(seed=n)
        env.step(env.action_space.sample())
        draws.append(info["context"])
    actual = np.concatenate([getattr(model, n).ravel() for n in names])
    np.testing.assert_array_equal(actual, nominal * draws[-1])
    for n, value in fixed.items():
        np.testing.assert_array_equal(getattr(model, n), value)

    # MuJoCo's derived constants are those of a model compiled with these parameters.
    fresh = mujoco.MjModel.from_xml_path(env.unwrapped.fullpath)
    for n in names:
        getattr(fresh, n)[:] = getattr(model, n)
    mujoco.mj_setConst(fresh, mujoco.MjData(fresh))
    for n in ("body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"):
        np.testing.assert_allclose(getattr(model, n), getattr(fresh, n), rtol=1e-12)
        assert not np.allclose(getattr(model, n), getattr(parent, n))

    exponents = np.log(np.array(draws))  # base ** U(-3, 3), element by element
    bases = np.repeat([1.5, 1.5, 1.3, 1.5], [getattr(parent, n).size for n in names])
    exponents /= np.log(bases)
    assert np.abs(exponents).max() <= 3 and np.abs(exponents).max() > 2.99
    assert np.abs(exponents.mean(0)).max() < 0.6 and exponents.std() == pytest.approx(3**0.5, rel=0.02)
    correlations = np.corrcoef(exponents.T) - np.eye(size)
    assert np.abs(correlations).max() < 0.4, "each element has its own multiplier"


def test_locomotion_ranges_are_arguments_and_survive_pickling():
    up = gym.make("ant-dir", angle_range=(np.pi / 2, np.pi / 2)).unwrapped
    slow = gym.make("cheetah-vel", velocity_range=(0.5, 0.6), reset_noise_scale=0.0).unwrapped
    plain = gym.make("hopper-param", exponent=0.0).unwrapped
    heavy = gym.make("walker-param", mass_base=2.0, damping_base=1.0, friction_base=1.0).unwrapped
    for env, check in [
        (up, lambda c: np.allclose(c, [0, 1])),
        (slow, lambda c: 0.5 <= c[0] <= 0.6),
        (plain, lambda c: (c == 1).all()),
        (heavy, lambda c: c.max() > 1.5**3 and (c[32:] == 1).all()),
    ]:
        copy = pickle.loads(pickle.dumps(env))
        contexts = [e.reset(seed=0)[1]["context"] for e in (env, copy)]
        assert check(contexts[0])
        np.testing.assert_array_equal(*contexts)


# ----------------------------------------------------------------------------------------------------- Meta-World


def test_ml10_is_meta_worlds_own():
    """The same ten tasks with the same 50 goals each as metaworld.ML10 draws from the same seed."""
    theirs = metaworld.ML10(seed=0)
    ours = gym.make("ml10").unwrapped
    assert tuple(theirs.train_classes) == TASKS["ml10"] == ours.tasks
    goals = [task for name in ours.tasks for task in ours.goals[name]]
    assert [(t.env_name, t.data) for t in goals] == [(t.env_name, t.data) for t in theirs.train_tasks]


def test_ml10_appendix_has_the_tasks_that_the_paper_names():
    swapped = {"sweep-v3", "button-press-topdown-v3", "door-open-v3"}
    assert set(TASKS["ml10"]) - set(TASKS["ml10-appendix"]) == swapped
    assert set(TASKS["ml10-appendix"]) - set(TASKS["ml10"]) == {"sweep-into-v3", "button-press-v3", "dial-turn-v3"}
    assert gym.make("ml10-appendix").unwrapped.tasks == TASKS["ml10-appendix"]
    with pytest.raises(ValueError, match="there are ml10, ml10-appendix"):
        gym.make("ml10", benchmark="ml45")


def test_meta_world_simulators_get_the_arguments_and_are_closed():
    env = gym.make("ml10", render_mode="rgb_array", camera_name="corner", width=64, height=32).unwrapped
    env.reset(seed=0, options={"context": [0, 0]})
    simulator, closed = env.simulator, []
    assert (simulator.render_mode, simulator.camera_name, simulator.width) == ("rgb_array", "corner", 64)
    simulator.close = lambda: closed.append(True)
    env.close()
    assert closed
    assert envs.manipulation.goals_of(("reach-v3",), 0)[1] != envs.manipulation.goals_of(("reach-v3",), 1)[1]


def test_meta_world_draws_tasks_and_goals_evenly_and_shares_its_benchmark():
    env, other = gym.make("ml10").unwrapped, gym.make("ml10").unwrapped
    assert env.goals is other.goals, "one benchmark object per process"
    assert not env.simulators
    env.reset(seed=0, options={"context": [4, 7]})
    assert list(env.simulators) == ["drawer-close-v3"], "a simulator is built when its task is first drawn"
    simulator = env.simulator
    env.reset(options={"context": [4, 8]})
    assert env.simulator is simulator
    env.simulators = dict.fromkeys(env.tasks, simulator)  # a stand-in for all ten: only the draws matter from here on
    simulator.set_task = simulator.reset = lambda *_: (None, None)
    draws = np.array([env.reset(seed=1000 if n == 0 else None)[1]["context"] for n in range(2000)]).astype(int)
    assert np.bincount(draws[:, 0], minlength=10).min() > 150 and len(set(draws[:, 1])) == 50


@pytest.mark.parametrize("name, task", list(product(("ml10", "ml10-appendix"), range(10))))
def test_meta_world_equals_a_bare_environment_with_its_goal_hidden(name, task):
    env = gym.make(name)
    ours = env.unwrapped
    episode(env, sampled_actions(env, 20), seed=0, options={"context": [task, 5]})  # the simulator has been used
    observation, info = env.reset(seed=0, options={"context": [task, 13]})
    assert info["task"] == TASKS[name][task]
    bare = ours.classes[info["task"]]()
    bare.set_task(ours.goals[info["task"]][13])
    observation_, _ = bare.reset()
    np.testing.assert_array_equal(observation, observation_)
    for action in sampled_actions(env, 20):
        observation, reward, terminated, truncated, info = env.step(action)
        observation_, reward_, *_, info_ = bare.step(action)
        np.testing.assert_array_equal(observation, observation_)
        assert reward == reward_ and info["success"] == info_["success"] and info["task"] == TASKS[name][task]
        assert not observation[36:].any(), "the goal is hidden"
        assert not terminated and not truncated
    assert all(type(value) is float for key, value in info.items() if key not in ("context", "task"))


def test_meta_world_reports_success_step_by_step_and_ends_after_300():
    """Meta-World's own scripted policy solves drawer-close, and its success is visible in our info."""
    from metaworld.policies import SawyerDrawerCloseV3Policy

    env, policy = gym.make("ml10"), SawyerDrawerCloseV3Policy()
    observation, info = env.reset(seed=0, options={"context": [4, 0]})
    assert info["success"] == 0.0
    successes = []
    while True:
        observation, _, terminated, truncated, info = env.step(np.clip(policy.get_action(observation), -1, 1))
        successes.append(info["success"])
        assert not terminated, "success does not end an episode"
        if truncated:
            break
    assert len(successes) == 300 and max(successes) == 1.0 and successes[0] == 0.0
