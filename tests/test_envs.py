"""The environments: contexts, seeds, rewards and parameters, each against an independent computation."""

import pickle

import gymnasium as gym
import metaworld
import mujoco
import numpy as np
import pytest
from conftest import equal
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from metaworld.policies import SawyerDrawerCloseV3Policy

import envs
from envs.manipulation import TASKS, goals_of

RIGHT, UP, LEFT, DOWN = range(4)
TMAZES = ["tmaze-passive", "tmaze-active"]
PARENTS = {"ant-dir": "Ant", "cheetah-vel": "HalfCheetah", "walker-param": "Walker2d", "hopper-param": "Hopper"}
CONTEXT_SIZE = dict.fromkeys(TMAZES, 1) | {"point-robot": 2, "ant-dir": 2, "cheetah-vel": 1, "walker-param": 65}
CONTEXT_SIZE |= {"hopper-param": 41, "ml10": 2}
MAX_STEPS = {"point-robot": 50, "ml10": 300, "ml10-appendix": 300} | dict.fromkeys(PARENTS, 200)


def episode(env, actions, **reset):
    """[(observation, reward, info), ...] of one episode under these actions."""
    observation, info = env.reset(**reset)
    trace, ended = [(observation, 0.0, info)], False
    for action in actions:
        if not ended:
            observation, reward, terminated, truncated, info = env.step(action)
            trace.append((observation, reward, info))
            ended = terminated or truncated
    return trace


def sampled_actions(env, count, seed=0):
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


# ---------------------------------------------------------------------------------------------- every environment


def test_ids_are_registered():
    assert sorted(envs.IDS) == sorted([*CONTEXT_SIZE, "ml10-appendix"])
    for name, steps in MAX_STEPS.items():
        assert gym.spec(name).max_episode_steps == steps


@pytest.mark.filterwarnings("ignore:.*Box observation space .*infinity")
@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_check_env(name):
    # Pictures are checked too where they need no graphics library.
    check_env(gym.make(name).unwrapped, skip_render_check=not name.startswith(("tmaze", "point")))


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_same_seed_gives_the_same_episodes_to_the_bit_whatever_came_before(name):
    first, second = gym.make(name), gym.make(name)
    actions = sampled_actions(first, 40)
    episode(second, sampled_actions(second, 15, seed=1), seed=99)  # leaves a used simulator behind
    second.reset()
    assert equal(episode(first, actions, seed=5), episode(second, actions, seed=5))
    assert equal(episode(first, actions), episode(second, actions)), "and the unseeded episode after it"


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
        info["context"][:] = 1e9  # what a caller writes there does not reach the environment


@pytest.mark.parametrize("name", ["point-robot", *PARENTS])
def test_start_state_does_not_depend_on_the_context(name):
    """With the observation at t = 0 the same for every context, nothing of the context can be in it (paper, Eq. 4)."""
    env = gym.make(name)
    plain, info = env.reset(seed=11)
    following = env.reset()[1]["context"]
    fixed = np.roll(info["context"], 1) if info["context"].size > 1 else info["context"] + 0.5
    given = fixed.copy()
    other, info = env.reset(seed=11, options={"context": given})
    assert equal(info["context"], fixed) and equal(plain, other)
    given[:] = 1e9  # the caller's array is not the environment's
    assert equal(env.step(env.action_space.sample())[-1]["context"], fixed)
    assert equal(env.reset()[1]["context"], following), "nor does fixing one change the next"


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_a_context_that_makes_no_sense_is_refused_in_one_line(name):
    env, size = gym.make(name), CONTEXT_SIZE[name]
    outside = {"tmaze-passive": [[0.5]], "ant-dir": [[1.0, 1.0]], "ml10": [[10, 0], [0, 50]]}.get(name, [])
    for bad in (np.zeros(size + 1), "left", np.full(size, np.nan), None, *outside):
        with pytest.raises(ValueError, match="the context must be") as error:
            env.reset(options={"context": bad})
        assert "\n" not in str(error.value)


def test_make_vec_tells_the_longest_episode_and_resets_on_the_same_step():
    for name in ("point-robot", "cheetah-vel"):
        assert envs.make_vec(name, 2)[1] == MAX_STEPS[name]
        vec, longest = envs.make_vec(name, 2, max_episode_steps=9)
        vec.reset(seed=0)
        ends = [vec.step(vec.action_space.sample())[3].tolist() for _ in range(longest)]
        assert longest == 9 and ends == [[False, False]] * 8 + [[True, True]]
    assert envs.make_vec("tmaze-passive", 2, corridor_length=7)[1] == 8
    assert envs.make_vec("tmaze-active", 2, corridor_length=7)[1] == 9
    assert envs.make_vec("envs.point:point-robot", 2)[1] == 50, "module:id imports the module first"
    vec, _ = envs.make_vec("cheetah-vel", 2, velocity_range=(2.0, 2.0))
    assert (vec.reset()[1]["context"] == 2).all(), "arguments reach the environment"
    vec, longest = envs.make_vec("CartPole-v1", 2)  # has a vector of its own, which resets one step later
    assert longest == 500 and vec.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    gym.register("endless", entry_point="envs.point:PointRobot")
    assert envs.make_vec("endless", 2, max_episode_steps=6)[1] == 6
    for bad, options, answer in (
        ("endless", {}, "without a time limit"),
        ("tmaze-passive", {"max_episode_steps": 5}, "follows from corridor_length"),
        ("no_such_module:ant-dir", {}, "cannot import no_such_module"),
        ("ant-direction", {}, "unknown environment.*tmaze-passive.*ant-dir"),
        ("no such thing", {}, "unknown environment"),
        ("cheetah-vel", {"actions": gym.spaces.Discrete}, "has actions Box.*Discrete is needed"),
        ("tmaze-active", {"actions": gym.spaces.Box}, "has actions Discrete.*a flat, bounded Box is needed"),
        ("odd_envs:echo", {"video_folder": "/nowhere"}, "echo cannot be rendered"),
    ):
        with pytest.raises(ValueError, match=answer) as error:
            envs.make_vec(bad, 2, **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_vectors_seed_their_environments_apart(name):
    """Environment i of a vector is the environment seeded with seed + i."""
    vec, _ = envs.make_vec(name, 3)
    observations, infos = vec.reset(seed=20)
    actions = np.array(sampled_actions(gym.make(name), 3))
    next_observations, rewards, _, _, next_infos = vec.step(actions)
    assert len({tuple(context) for context in infos["context"]}) == (2 if name in TMAZES else 3)
    env = gym.make(name)
    for i in range(3):
        before, after = episode(env, [actions[i]], seed=20 + i)
        assert equal((before[0], before[2]["context"]), (observations[i], infos["context"][i]))
        assert equal((after[0], after[2]["context"]), (next_observations[i], next_infos["context"][i]))
        assert after[1] == rewards[i]
    fixed = infos["context"][0]
    assert equal(vec.reset(options={"context": fixed})[1]["context"], np.tile(fixed, (3, 1)))


@pytest.mark.parametrize("name, kwargs", [(t, {"corridor_length": 5}) for t in TMAZES] + [("point-robot", {})])
def test_native_vector_equals_a_sync_vector_to_the_bit(name, kwargs):
    """Observations, rewards, ends, infos and final infos, over 500 and more random episodes."""
    native = gym.make_vec(name, num_envs=16, vectorization_mode="vector_entry_point", **kwargs)
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    sync = gym.make_vec(name, num_envs=16, vectorization_mode="sync", vector_kwargs=same_step, **kwargs)
    assert native.single_observation_space == sync.single_observation_space
    assert native.single_action_space == sync.single_action_space
    for seed in (3, [5] * 8 + [None] * 8):
        assert equal(native.reset(seed=seed), sync.reset(seed=seed))
    native.reset()[1]["context"][:] = 1e9
    sync.reset()
    sync.action_space.seed(1)
    episodes, returned = 0, []
    while episodes < 500:
        actions = sync.action_space.sample()
        if name in TMAZES:  # drift to the right, so that goals and horizons are both reached
            actions = np.where(np.random.default_rng(episodes).random(16) < 0.5, RIGHT, actions)
        ours = native.step(actions)
        assert equal(ours, sync.step(actions))
        returned.append((ours[0], ours[0].copy()))
        episodes += int((ours[2] | ours[3]).sum())
    assert all(equal(array, copy) for array, copy in returned), "what was returned is never written again"


def test_native_vector_takes_a_list_of_seeds_and_refuses_what_it_cannot_do():
    vec = gym.make_vec("point-robot", num_envs=3)
    first, second, third = vec.reset(seed=[4, 5, 4])[1]["context"]
    assert equal(first, third) and not equal(first, second)
    assert gym.make_vec("point-robot", num_envs=2).np_random[1].random() != vec.np_random[1].random()
    with pytest.raises(ValueError, match='"sync" to render'):
        gym.make_vec("tmaze-passive", num_envs=2, render_mode="rgb_array")
    with pytest.raises(ValueError, match="3 of them"):
        vec.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="the context must be"):
        gym.make_vec("tmaze-passive", num_envs=2).reset(options={"context": [0.0]})


# --------------------------------------------------------------------------------------------------------- T-Maze


def rewards_of(name, length, goal, actions):
    """Rewards up to the end of the episode, which is always a termination."""
    env, rewards, terminated = gym.make(name, corridor_length=length), [], False
    env.reset(options={"context": [goal]})
    while not terminated:
        _, reward, terminated, truncated, _ = env.step(actions[len(rewards)])
        rewards.append(reward)
        assert not truncated, "the horizon terminates"
    return rewards


@pytest.mark.parametrize("goal", [1, -1])
@pytest.mark.parametrize("length", [2, 3, 49, 600])
def test_tmaze_best_policies_and_one_that_never_moves(length, goal):
    turn, wrong = (UP, DOWN) if goal == 1 else (DOWN, UP)
    assert rewards_of("tmaze-passive", length, goal, [RIGHT] * length + [turn]) == [0.0] * length + [1.0]
    assert rewards_of("tmaze-passive", length, goal, [RIGHT] * length + [wrong]) == [0.0] * (length + 1)
    assert rewards_of("tmaze-active", length, goal, [LEFT, *[RIGHT] * length, turn]) == [0.0] * (length + 1) + [1.0]
    assert rewards_of("tmaze-passive", length, goal, [UP] * (length + 1)) == [-1 / length] * length + [0.0]


@pytest.mark.parametrize("name", TMAZES)
def test_tmaze_goals_and_false_cues_are_even_and_independent(name):
    vec, _ = envs.make_vec(name, 400, corridor_length=4)
    observations, infos = vec.reset(seed=0)
    goals, cues = infos["context"][:, 0], observations[:, 2]
    assert set(goals) == {1.0, -1.0} and 160 < (goals == 1).sum() < 240
    assert set(cues) == {4.0, -4.0} and 160 < (cues == 4).sum() < 240
    assert (cues == 4 * goals).all() if name == "tmaze-passive" else 160 < (cues == 4 * goals).sum() < 240


def test_tmaze_active_start_is_blocked_free_and_uninformative():
    env = gym.make("tmaze-active", corridor_length=4)
    cues = {goal: [env.reset(seed=s, options={"context": [goal]})[0][2] for s in range(50)] for goal in (1, -1)}
    assert cues[1] == cues[-1], "the start's cue does not depend on the goal"
    assert cues[1] == [env.reset(seed=s)[0][2] for s in range(50)], "nor on whether the goal was drawn or given"
    start, _ = env.reset(seed=0)
    after, reward, *_ = env.step(RIGHT)
    assert after[0] == start[0] == -3 and after[2] == 0 and reward == 0
    assert env.step(RIGHT)[0][0] == -2, "blocked at the first step alone"
    env.reset(seed=0, options={"context": [-1]})
    assert [env.step(action)[0][2] for action in (LEFT, RIGHT, LEFT)] == [-4, 0, -4], "the oracle's cue, at every visit"


def test_tmaze_observes_in_cells_and_pays_by_hand():
    """(x, y, cue) with the junction as the origin and a cue of the corridor's length: one maze and a vector of them."""
    env, (vec, _) = gym.make("tmaze-passive", corridor_length=4), envs.make_vec("tmaze-passive", 3, corridor_length=4)
    for first in (env.reset(options={"context": [1]})[0], *vec.reset(options={"context": [1]})[0]):
        assert equal(first, np.float32([-4, 0, 4]))
    steps = [
        (LEFT, (-4, 0, 4), -1 / 4),  # into the wall: stays where it is
        (RIGHT, (-3, 0, 0), 0.0),
        (LEFT, (-4, 0, 4), -2 / 4),
        (UP, (-4, 0, 4), -1 / 4),
        (RIGHT, (-3, 0, 0), 0.0),  # the fifth step reaches the horizon: it terminates, without cost
    ]
    for n, (action, expected, reward) in enumerate(steps):
        observation, got, terminated, truncated, _ = env.step(action)
        assert (got, terminated, truncated) == (reward, n == 4, False)
        observations, rewards, *_, infos = vec.step(np.full(3, action))
        assert (rewards == reward).all()
        for observed in (observation, *(infos["final_obs"] if n == 4 else observations)):
            assert equal(observed, np.float32(expected))
    env.reset(options={"context": [1]})
    observed = [tuple(env.step(action)[0]) for action in (RIGHT, RIGHT, RIGHT, RIGHT, DOWN)]
    assert observed == [(-3, 0, 0), (-2, 0, 0), (-1, 0, 0), (0, 0, 0), (0, -1, 0)]


@pytest.mark.parametrize("length", [1, -3, 2.5, 3.0, np.nan, "5"])
def test_tmaze_refuses_a_short_corridor_in_one_line(length):
    for make in (gym.make, lambda name, **kwargs: envs.make_vec(name, 2, **kwargs)):
        with pytest.raises(ValueError, match="corridor length must be a whole number, 2 or more") as error:
            make("tmaze-active", corridor_length=length)
        assert "\n" not in str(error.value)


def pixels(image, colour):
    return np.argwhere((image == colour).all(-1))  # (row, column)


def test_tmaze_text_shows_agent_oracle_and_true_goal():
    env = gym.make("tmaze-passive", corridor_length=4, render_mode="ansi")
    env.reset(options={"context": [-1]})
    assert env.render().splitlines() == ["    x", "A---+", "    G", "step 0 of 5, cue -1"]
    for action in (RIGHT, RIGHT, RIGHT, RIGHT, DOWN):
        env.step(action)
    assert env.render().splitlines() == ["    x", "O---+", "    A", "step 5 of 5, cue +0"]


@pytest.mark.parametrize("length", [2, 600])
def test_tmaze_picture_shows_agent_oracle_cue_and_true_goal(length):
    env = gym.make("tmaze-passive", corridor_length=length, render_mode="rgb_array")
    colours = {"oracle": (60, 120, 216), "goal": (60, 170, 90), "other": (110, 110, 110), "agent": (240, 150, 40)}
    for goal in (1, -1):
        env.reset(options={"context": [goal]})
        start = env.render()
        for _ in range(length):
            env.step(RIGHT)
        image = env.render()
        assert image.dtype == np.uint8 and image.shape[0] % 2 == image.shape[1] % 2 == 0 and image.shape[1] < 1600
        where = {name: pixels(image, colour) for name, colour in colours.items()}
        assert all(len(places) > 500 for places in where.values())
        where = {name: places.mean(0) for name, places in where.items()}
        assert where["agent"][1] > pixels(start, colours["agent"]).mean(0)[1] + 50, "the agent went right"
        assert where["agent"][1] > where["oracle"][1] + 50
        assert goal * where["goal"][0] < goal * where["agent"][0] < goal * where["other"][0], "rows count from above"
        cue = pixels(start, 255)  # an arrow, wide at its base and pointing to the goal
        narrow, wide = (np.ptp(cue[goal * cue[:, 0] < np.quantile(goal * cue[:, 0], q), 1]) for q in (0.25, 1.0))
        assert len(cue) > 50 and narrow < wide and not len(pixels(image, 255))


# ---------------------------------------------------------------------------------------------------- point robot


def test_point_robot_moves_and_pays_as_defined():
    env = gym.make("point-robot", render_mode="rgb_array")
    observation, _ = env.reset(seed=0, options={"context": [0.0, -1.0]})
    np.testing.assert_array_equal(observation, [0, 0])
    observation, reward, *_ = env.step(np.array([1.0, -0.5], dtype=np.float32))
    np.testing.assert_allclose(observation, [0.1, -0.05], rtol=1e-6)
    assert reward == pytest.approx(-np.hypot(0.1, 0.95))
    observation, *_ = env.step(np.array([30.0, 0.0], dtype=np.float32))
    np.testing.assert_allclose(observation, [0.2, -0.05], rtol=1e-6)  # the action is clipped to its box
    image = env.render()  # 80 pixels a unit, the origin in the middle
    np.testing.assert_allclose(pixels(image, (60, 170, 90)).mean(0), [200, 120], atol=2)
    np.testing.assert_allclose(pixels(image, (240, 150, 40)).mean(0), [124, 136], atol=2)
    goals = np.array([env.reset(seed=s)[1]["context"] for s in range(2000)])
    np.testing.assert_allclose(np.linalg.norm(goals, axis=1), 1)
    assert np.abs(goals.mean(0)).max() < 0.06, "all around the circle"


# ----------------------------------------------------------------------------------------------------- locomotion


@pytest.mark.parametrize("name", PARENTS)
def test_locomotion_differs_from_its_parent_in_nothing_else(name):
    """From the same state, with the same actions and a neutral context: the same observations, ends and infos."""
    neutral = {"walker-param": np.ones(65), "hopper-param": np.ones(41), "ant-dir": [1.0, 0.0], "cheetah-vel": [1.0]}
    ours, theirs = gym.make(name), gym.make(f"{PARENTS[name]}-v5")
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    ours.reset(seed=0, options={"context": neutral[name]})
    theirs.reset(seed=1)
    theirs.unwrapped.set_state(ours.unwrapped.data.qpos, ours.unwrapped.data.qvel)
    terminated = False
    for action in sampled_actions(ours, 30):
        if not terminated:
            observation, reward, terminated, _, info = ours.step(action)
            observation_, reward_, terminated_, _, info_ = theirs.step(action)
            np.testing.assert_allclose(observation, observation_, rtol=0, atol=1e-9)
            info.pop("context")
            assert terminated == terminated_ and info.keys() == info_.keys()
            if name != "cheetah-vel":
                assert (reward, info) == (pytest.approx(reward_, abs=1e-9), pytest.approx(info_, abs=1e-9))


def test_ant_dir_reward_from_positions_before_and_after():
    env = gym.make("ant-dir")
    data = env.unwrapped.data
    for seed in range(3):
        direction, terminated = env.reset(seed=seed)[1]["context"], False
        for action in sampled_actions(env, 40, seed):
            if not terminated:
                before = data.xpos[1, :2].copy()
                _, reward, terminated, _, info = env.step(action)
                parts = {
                    "reward_forward": (data.xpos[1, :2] - before) / (5 * 0.01) @ direction,
                    "reward_survive": float(0.2 <= data.qpos[2] <= 1.0),
                    "reward_ctrl": -0.5 * (action.astype(np.float64) ** 2).sum(),
                    "reward_contact": -5e-4 * (np.clip(data.cfrc_ext, -1, 1) ** 2).sum(),
                }
                assert {key: info[key] for key in parts} == pytest.approx(parts, abs=1e-6)
                assert reward == pytest.approx(sum(parts.values()), abs=1e-6)
    directions = np.array([env.reset(seed=s)[1]["context"] for s in range(300)])
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1)
    assert np.abs(directions.mean(0)).max() < 0.15, "all around the circle"


def test_cheetah_vel_reward_from_positions_before_and_after():
    env = gym.make("cheetah-vel")
    for seed in range(3):
        target = env.reset(seed=seed)[1]["context"][0]
        for action in sampled_actions(env, 40, seed):
            before = env.unwrapped.data.qpos[0]
            _, reward, terminated, _, info = env.step(action)
            forward = -abs((env.unwrapped.data.qpos[0] - before) / (5 * 0.01) - target)
            control = -0.05 * (action.astype(np.float64) ** 2).sum()
            assert (info["reward_forward"], info["reward_ctrl"]) == pytest.approx((forward, control), abs=1e-6)
            assert reward == pytest.approx(forward + control, abs=1e-6) and not terminated
    targets = [env.reset(seed=s)[1]["context"][0] for s in range(300)]
    assert 0 <= min(targets) < 0.1 and 2.9 < max(targets) <= 3 and 1.3 < np.mean(targets) < 1.7


@pytest.mark.parametrize("name", ["walker-param", "hopper-param"])
def test_parameters_after_200_resets_are_nominal_times_multiplier(name):
    env, parent = gym.make(name), gym.make(f"{PARENTS[name]}-v5").unwrapped.model
    model, names = env.unwrapped.model, ["body_mass", "body_inertia", "dof_damping", "geom_friction"]
    draws = []
    for n in range(200):
        draws.append(env.reset(seed=n)[1]["context"])
        env.step(env.action_space.sample())
    nominal, actual = (np.concatenate([getattr(m, n).ravel() for n in names]) for m in (parent, model))
    assert equal(actual, nominal * draws[-1])
    for n in ("geom_size", "body_pos", "jnt_range", "actuator_gear", "dof_armature"):
        assert equal(getattr(model, n), getattr(parent, n)), "and nothing else is changed"

    # MuJoCo's derived constants are those of a model compiled with these parameters.
    fresh = mujoco.MjModel.from_xml_path(env.unwrapped.fullpath)
    for n in names:
        getattr(fresh, n)[:] = getattr(model, n)
    mujoco.mj_setConst(fresh, mujoco.MjData(fresh))
    for n in ("body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"):
        np.testing.assert_allclose(getattr(model, n), getattr(fresh, n), rtol=1e-12)
        assert not np.allclose(getattr(model, n), getattr(parent, n))

    bases = np.repeat([1.5, 1.5, 1.3, 1.5], [getattr(parent, n).size for n in names])
    exponents = np.log(np.array(draws)) / np.log(bases)  # base ** U(-3, 3), element by element
    assert np.abs(exponents).max() <= 3 and np.abs(exponents).max() > 2.99
    assert np.abs(exponents.mean(0)).max() < 0.6 and exponents.std() == pytest.approx(3**0.5, rel=0.02)
    correlations = np.corrcoef(exponents.T) - np.eye(CONTEXT_SIZE[name])
    assert np.abs(correlations).max() < 0.4, "each element has its own multiplier"


@pytest.mark.parametrize(
    "name, ranges, check",
    [
        ("ant-dir", {"angle_range": (np.pi / 2, np.pi / 2)}, lambda c: np.allclose(c, [0, 1])),
        ("cheetah-vel", {"velocity_range": (0.5, 0.6), "reset_noise_scale": 0.0}, lambda c: 0.5 <= c[0] <= 0.6),
        ("hopper-param", {"exponent": 0.0}, lambda c: (c == 1).all()),
        ("walker-param", {"mass_base": 2.0, "damping_base": 1.0, "friction_base": 1.0}, lambda c: (c[32:] == 1).all()),
    ],
)
def test_locomotion_ranges_are_arguments_and_survive_pickling(name, ranges, check):
    env = gym.make(name, **ranges).unwrapped
    first, second = (e.reset(seed=0)[1]["context"] for e in (env, pickle.loads(pickle.dumps(env))))
    assert check(first) and equal(first, second)


# ----------------------------------------------------------------------------------------------------- Meta-World


def test_ml10_is_meta_worlds_own():
    """The same ten tasks with the same 50 goals each as metaworld.ML10 draws from the same seed."""
    theirs = metaworld.ML10(seed=0)
    ours = gym.make("ml10").unwrapped
    assert tuple(theirs.train_classes) == TASKS["ml10"] == ours.tasks
    goals = [task for name in ours.tasks for task in ours.goals[name]]
    assert [(t.env_name, t.data) for t in goals] == [(t.env_name, t.data) for t in theirs.train_tasks]
    other = goals_of(("reach-v3",), seed=1)[1]["reach-v3"]
    assert [t.data for t in other] != [t.data for t in ours.goals["reach-v3"]], "another seed draws other goals"


def test_ml10_appendix_has_the_tasks_that_the_paper_names():
    swapped = {"sweep-v3", "button-press-topdown-v3", "door-open-v3"}
    assert set(TASKS["ml10"]) - set(TASKS["ml10-appendix"]) == swapped
    assert set(TASKS["ml10-appendix"]) - set(TASKS["ml10"]) == {"sweep-into-v3", "button-press-v3", "dial-turn-v3"}
    assert gym.make("ml10-appendix").unwrapped.tasks == TASKS["ml10-appendix"]
    with pytest.raises(ValueError, match="there are ml10, ml10-appendix"):
        gym.make("ml10", benchmark="ml45")


def test_meta_world_draws_tasks_and_goals_evenly_and_builds_what_it_needs():
    env = gym.make("ml10", render_mode="rgb_array", camera_name="corner", width=64).unwrapped
    assert env.goals is gym.make("ml10").unwrapped.goals, "one benchmark object per process"
    env.reset(seed=0, options={"context": [4, 7]})
    assert list(env.simulators) == ["drawer-close-v3"], "a simulator is built when its task is first drawn"
    simulator = env.simulator
    assert (simulator.render_mode, simulator.camera_name, simulator.width) == ("rgb_array", "corner", 64)
    env.reset(options={"context": [4, 8]})
    assert env.simulator is simulator
    env.simulators = dict.fromkeys(env.tasks, simulator)  # in place of all ten: only the draws matter from here on
    simulator.set_task = simulator.reset = lambda *_: (None, None)
    draws = np.array([env.reset(seed=1000 if n == 0 else None)[1]["context"] for n in range(2000)]).astype(int)
    assert np.bincount(draws[:, 0], minlength=10).min() > 150 and len(set(draws[:, 1])) == 50


@pytest.mark.parametrize(
    "name, task", [("ml10", task) for task in range(10)] + [("ml10-appendix", t) for t in (3, 7, 8)]
)
def test_meta_world_equals_a_bare_environment_with_its_goal_hidden(name, task):
    env = gym.make(name)
    episode(env, sampled_actions(env, 20), seed=0, options={"context": [task, 5]})  # the simulator has been used
    observation, info = env.reset(seed=0, options={"context": [task, 13]})
    assert info["task"] == TASKS[name][task]
    bare = env.unwrapped.classes[info["task"]]()
    bare.set_task(env.unwrapped.goals[info["task"]][13])
    assert equal(observation, bare.reset()[0])
    for action in sampled_actions(env, 20):
        observation, reward, terminated, truncated, info = env.step(action)
        observation_, reward_, *_, info_ = bare.step(action)
        assert equal(observation, observation_) and reward == reward_ and info["success"] == info_["success"]
        assert not observation[36:].any(), "the goal is hidden"
        assert info["task"] == TASKS[name][task] and not terminated and not truncated
    assert all(type(value) is float for key, value in info.items() if key not in ("context", "task"))


@pytest.mark.filterwarnings("ignore:Constant.* may be too high")  # Meta-World's policy about itself
def test_meta_world_reports_success_step_by_step_and_ends_after_300():
    """Meta-World's own scripted policy solves drawer-close, and its success is in our info."""
    env, policy = gym.make("ml10"), SawyerDrawerCloseV3Policy()
    observation, info = env.reset(seed=0, options={"context": [4, 0]})
    successes, truncated = [info["success"]], False
    while not truncated:
        observation, _, terminated, truncated, info = env.step(np.clip(policy.get_action(observation), -1, 1))
        successes.append(info["success"])
        assert not terminated, "success does not end an episode"
    assert len(successes) == 301 and max(successes) == 1.0 and successes[:2] == [0.0, 0.0]
