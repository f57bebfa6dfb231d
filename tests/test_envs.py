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
    """What `reset` and `step` return under these actions up to the end of the episode, all in the form of `step`."""
    observation, info = env.reset(**reset)
    trace = [(observation, 0.0, False, False, info)]
    for action in actions:
        if not any(trace[-1][2:4]):
            trace.append(env.step(action))
    return trace


def sampled_actions(env, count, seed=0):
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


# --------------------------------------------------------------------------------------------------- every environment
@pytest.mark.filterwarnings("ignore:.*Box observation space .*infinity")
@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_same_seed_gives_the_same_episodes_to_the_bit_whatever_came_before(name):
    # Gymnasium's own checks, of pictures too where they need no graphics library.
    check_env(gym.make(name).unwrapped, skip_render_check=not name.startswith(("tmaze", "point")))
    first, second = gym.make(name), gym.make(name)
    actions = sampled_actions(first, 40)
    episode(second, sampled_actions(second, 15, seed=1), seed=99)  # leaves a used simulator behind
    second.reset()
    assert equal(episode(first, actions, seed=5), episode(second, actions, seed=5))
    assert equal(episode(first, actions), episode(second, actions)), "and the unseeded episode after it"


@pytest.mark.parametrize("name", CONTEXT_SIZE)
def test_context_is_new_at_every_reset_and_in_every_info_and_refused_if_it_makes_no_sense(name):
    env, size = gym.make(name), CONTEXT_SIZE[name]
    contexts = [env.reset(seed=7)[1]["context"]] + [env.reset()[1]["context"] for _ in range(20)]
    assert len({tuple(c) for c in contexts}) > 1
    context = contexts[-1].copy()
    contexts[-1][:] = 1e9
    assert context.shape == (size,) and context.dtype == np.float64
    for action in sampled_actions(env, 15):
        *_, info = env.step(action)
        np.testing.assert_array_equal(info["context"], context)
        info["context"][:] = 1e9  # what a caller writes there does not reach the environment

    outside = {"tmaze-passive": [[0.5]], "ant-dir": [[1.0, 1.0]], "ml10": [[10, 0], [0, 50]]}.get(name, [])
    for bad in (np.zeros(size + 1), "left", np.full(size, np.nan), None, *outside):
        for one_or_many in (env, envs.make_vec(name, 2)[0]):
            with pytest.raises(ValueError, match=r"^the context must be[^\n]*\Z"):
                one_or_many.reset(options={"context": bad})


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


def test_make_vec_tells_the_longest_episode_and_resets_on_the_same_step():
    """What it refuses is in test_errors.py."""
    assert sorted(envs.IDS) == sorted([*TMAZES, *MAX_STEPS])
    assert {name: gym.spec(name).max_episode_steps for name in MAX_STEPS} == MAX_STEPS
    for name in ("point-robot", "cheetah-vel"):
        assert envs.make_vec(name, 2)[1] == MAX_STEPS[name]
        vec, longest = envs.make_vec(name, 2, max_episode_steps=9)
        vec.reset(seed=0)
        ends = [vec.step(vec.action_space.sample())[3].tolist() for _ in range(longest)]
        assert longest == 9 and ends == [[False, False]] * 8 + [[True, True]]
    assert envs.make_vec("tmaze-passive", 2, corridor_length=7)[1] == 8
    assert envs.make_vec("tmaze-active", 2, corridor_length=7)[1] == 9
    assert envs.make_vec("odd_envs:successful", 2, max_episode_steps=6)[1] == 6, "registered without a limit"
    vec, _ = envs.make_vec("cheetah-vel", 2, velocity_range=(2.0, 2.0))
    assert (vec.reset()[1]["context"] == 2).all(), "arguments reach the environment"
    contexts = np.stack([gym.make("cheetah-vel").reset(seed=seed)[1]["context"] for seed in (20, 21, 22)])
    assert equal(envs.make_vec("cheetah-vel", 3)[0].reset(seed=20)[1]["context"], contexts), "seeded apart"
    vec, longest = envs.make_vec("CartPole-v1", 2)  # has a vector of its own, which resets one step later
    assert longest == 500 and vec.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


@pytest.mark.parametrize("name, kwargs", [(t, {"corridor_length": 5}) for t in TMAZES] + [("point-robot", {})])
def test_native_vector_equals_a_sync_vector_to_the_bit(name, kwargs):
    """Observations, rewards, ends, infos and final infos, over 500 and more random episodes."""
    native, other = (gym.make_vec(name, 16, vectorization_mode="vector_entry_point", **kwargs) for _ in range(2))
    assert native.np_random[1].random() != other.np_random[1].random(), "without a seed"
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
    with pytest.raises(ValueError, match="16 of them"):
        native.reset(seed=[1, 2])
    with pytest.raises(ValueError, match='"sync" to render'):
        gym.make_vec(name, num_envs=2, render_mode="rgb_array")


# -------------------------------------------------------------------------------------------------------------- T-Maze
def rewards_of(name, length, goal, actions):
    """Rewards of an episode that the last of these actions terminates, be it at the horizon."""
    _, *steps = episode(gym.make(name, corridor_length=length), actions, options={"context": [goal]})
    assert [step[2:4] for step in steps] == [(False, False)] * (len(actions) - 1) + [(True, False)]
    return [step[1] for step in steps]


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
    observations, infos = envs.make_vec(name, 400, corridor_length=4)[0].reset(seed=0)
    goals, cues = infos["context"][:, 0], observations[:, 2]
    assert set(goals) == {1.0, -1.0} and 160 < (goals == 1).sum() < 240
    assert set(cues) == {4.0, -4.0} and 160 < (cues == 4).sum() < 240
    assert (cues == 4 * goals).all() if name == "tmaze-passive" else 160 < (cues == 4 * goals).sum() < 240


def test_tmaze_active_start_is_blocked_free_and_uninformative():
    env = gym.make("tmaze-active", corridor_length=4)
    cues = {goal: [env.reset(seed=s, options={"context": [goal]})[0][2] for s in range(50)] for goal in (1, -1)}
    assert cues[1] == cues[-1], "the start's cue does not depend on the goal"
    assert cues[1] == [env.reset(seed=s)[0][2] for s in range(50)], "nor on whether the goal was drawn or given"
    steps = episode(env, [RIGHT, RIGHT], seed=0)
    assert [step[0][0] for step in steps] == [-3, -3, -2], "blocked at the first step alone"
    assert steps[1][0][2] == 0 and steps[1][1] == 0
    env.reset(seed=0, options={"context": [-1]})
    assert [env.step(action)[0][2] for action in (LEFT, RIGHT, LEFT)] == [-4, 0, -4], "the oracle's cue, at every visit"


def test_tmaze_observes_in_cells_and_pays_by_hand():
    """(x, y, cue) with the junction as the origin and a cue of the corridor's length."""
    env, up = gym.make("tmaze-passive", corridor_length=4), {"context": [1]}
    steps = episode(env, [LEFT, RIGHT, LEFT, UP, RIGHT], options=up)
    seen = [[-4, 0, 4], [-4, 0, 4], [-3, 0, 0], [-4, 0, 4], [-4, 0, 4], [-3, 0, 0]]  # the first step is into the wall
    assert equal([step[0] for step in steps], [np.float32(observation) for observation in seen])
    assert [step[1] for step in steps] == [0.0, -1 / 4, 0.0, -2 / 4, -1 / 4, 0.0]  # the last one ends it, without cost
    assert [step[2:4] for step in steps] == [(False, False)] * 5 + [(True, False)], "the horizon terminates"
    _, *observed = (tuple(step[0]) for step in episode(env, [RIGHT] * 4 + [DOWN], options=up))
    assert observed == [(-3, 0, 0), (-2, 0, 0), (-1, 0, 0), (0, 0, 0), (0, -1, 0)]


@pytest.mark.parametrize("length", [1, -3, 2.5, 3.0, np.nan, "5"])
def test_tmaze_refuses_a_short_corridor_in_one_line(length):
    with pytest.raises(ValueError, match=r"^[^\n]*corridor length must be a whole number, 2 or more[^\n]*\Z"):
        envs.make_vec("tmaze-active", 2, corridor_length=length)


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
    actions = np.float32([[1.0, -0.5], [30.0, 0.0]])  # the second one is clipped to its box
    observations, rewards, *_ = zip(*episode(env, actions, options={"context": [0.0, -1.0]}))
    np.testing.assert_allclose(observations, [[0, 0], [0.1, -0.05], [0.2, -0.05]], rtol=1e-6)
    assert rewards[1] == pytest.approx(-np.hypot(0.1, 0.95))
    image = env.render()  # 80 pixels a unit, the origin in the middle
    np.testing.assert_allclose(pixels(image, (60, 170, 90)).mean(0), [200, 120], atol=2)
    np.testing.assert_allclose(pixels(image, (240, 150, 40)).mean(0), [124, 136], atol=2)
    goals = np.array([env.reset(seed=s)[1]["context"] for s in range(2000)])
    np.testing.assert_allclose(np.linalg.norm(goals, axis=1), 1)
    assert np.abs(goals.mean(0)).max() < 0.06, "all around the circle"


# ----------------------------------------------------------------------------------------------------- locomotion
@pytest.mark.parametrize("name", PARENTS)
def test_locomotion_differs_from_its_parent_in_the_reward_alone(name):
    """From the same state and with the same actions: the same observations, ends and infos."""
    ours, theirs, tolerance = gym.make(name), gym.make(f"{PARENTS[name]}-v5"), 1e-6 if name == "cheetah-vel" else 1e-9
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    for seed in range(3):
        _, info = ours.reset(seed=seed)
        if name.endswith("-param"):  # as the parent is
            _, info = ours.reset(seed=seed, options={"context": np.ones(CONTEXT_SIZE[name])})
        theirs.reset(seed=99)
        theirs.unwrapped.set_state(ours.unwrapped.data.qpos, ours.unwrapped.data.qvel)
        context, terminated = info["context"], False
        for action in sampled_actions(ours, 40, seed):
            if not terminated:
                observation, reward, terminated, _, info = ours.step(action)
                expected, _, *end, parts = theirs.step(action)
                np.testing.assert_allclose(observation, expected, rtol=0, atol=1e-9)
                if name == "ant-dir":
                    parts["reward_forward"] = np.array([parts["x_velocity"], parts["y_velocity"]]) @ context
                if name == "cheetah-vel":
                    parts["reward_forward"] = -abs(parts["x_velocity"] - context[0])
                    parts["reward_ctrl"] = -0.05 * (action.astype(np.float64) ** 2).sum()
                assert equal(info.pop("context"), context) and info == pytest.approx(parts, abs=tolerance)
                total = sum(value for key, value in parts.items() if key.startswith("reward_"))
                assert reward == pytest.approx(total, abs=tolerance) and terminated == end[0]


@pytest.mark.parametrize("name", PARENTS)
def test_the_camera_follows_the_robot(name):
    """With Gymnasium's own camera, which stands still, the robot is out of the picture after some metres."""
    envs.check_rendering(name)
    env = gym.make(name, render_mode="rgb_array")
    env.reset(seed=0)
    env.render()
    robot = env.unwrapped
    robot.set_state(robot.data.qpos + 20 * (np.arange(robot.model.nq) == 0), robot.data.qvel)
    with_robot = env.render()
    robot.model.geom_rgba[1:, 3] = 0  # all but the floor are transparent
    assert (env.render() != with_robot).any(axis=-1).mean() > 0.01
    env.close()


def test_directions_and_speeds_are_drawn_evenly():
    both = gym.make("ant-dir"), gym.make("cheetah-vel")
    directions, speeds = (np.array([env.reset(seed=s)[1]["context"] for s in range(300)]) for env in both)
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1)
    assert np.abs(directions.mean(0)).max() < 0.15, "all around the circle"
    assert 0 <= speeds.min() < 0.1 and 2.9 < speeds.max() <= 3 and 1.3 < speeds.mean() < 1.7


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


def test_locomotion_ranges_are_arguments_and_survive_pickling():
    for name, ranges, check in (
        ("ant-dir", {"angle_range": (np.pi / 2, np.pi / 2)}, lambda c: np.allclose(c, [0, 1])),
        ("cheetah-vel", {"velocity_range": (0.5, 0.6), "reset_noise_scale": 0.0}, lambda c: 0.5 <= c[0] <= 0.6),
        ("hopper-param", {"exponent": 0.0}, lambda c: (c == 1).all()),
        ("walker-param", {"mass_base": 2.0, "damping_base": 1.0, "friction_base": 1.0}, lambda c: (c[32:] == 1).all()),
    ):
        env = gym.make(name, **ranges).unwrapped
        first, second = (e.reset(seed=0)[1]["context"] for e in (env, pickle.loads(pickle.dumps(env))))
        assert check(first) and equal(first, second), name


# ----------------------------------------------------------------------------------------------------- Meta-World
def test_ml10_is_meta_worlds_own_and_its_variant_has_the_tasks_that_the_paper_names():
    """The same ten tasks with the same 50 goals each as metaworld.ML10 draws from the same seed."""
    theirs = metaworld.ML10(seed=0)
    ours = gym.make("ml10").unwrapped
    assert tuple(theirs.train_classes) == TASKS["ml10"] == ours.tasks
    goals = [task for name in ours.tasks for task in ours.goals[name]]
    assert [(t.env_name, t.data) for t in goals] == [(t.env_name, t.data) for t in theirs.train_tasks]
    other = goals_of(("reach-v3",), seed=1)[1]["reach-v3"]
    assert [t.data for t in other] != [t.data for t in ours.goals["reach-v3"]], "another seed draws other goals"

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


@pytest.mark.parametrize("name, task", [("ml10", i) for i in range(10)] + [("ml10-appendix", i) for i in (3, 7, 8)])
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
