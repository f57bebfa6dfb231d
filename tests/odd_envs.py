"""Small environments that the tests name as odd_envs:id."""

import gymnasium as gym
import numpy as np


class Successful(gym.Env):
    """Succeeds at the fourth of its steps only, and only where the seed is even; ends early where it is odd."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))

    def info(self):
        return {"success": float(self.t == 4 and self.even), "task": "even" if self.even else "odd"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.even = 0, seed is None or seed % 2 == 0  # every episode after the first one succeeds
        return np.zeros(3, dtype=np.float32), self.info()

    def step(self, action):
        self.t += 1
        return np.zeros(3, dtype=np.float32), 1.0, self.t == 3 and not self.even, False, self.info()


class Echo(Successful):
    """Its reward is the action that reached it."""

    action_space = gym.spaces.Box(5.0, 9.0, (1,))

    def step(self, action):
        return np.zeros(3, dtype=np.float32), float(action[0]), False, False, {}


class NotANumber(Echo):
    """Gives what is not a number, in training: evaluation has larger seeds."""

    def __init__(self, what, broken_reward=np.nan):
        self.what = what  # the reward of the seventh step, or the start of every episode but the first
        self.broken_reward = broken_reward

    def reset(self, *, seed=None, options=None):
        self.training = seed < 1000 if seed is not None else self.training
        observation, info = super().reset(seed=seed)
        broken = self.what == "start" and self.training and seed is None
        return observation + np.float32(np.nan if broken else 0.0), info

    def step(self, action):
        self.t += 1
        broken = self.what == "reward" and self.training and self.t == 7
        return np.zeros(3, dtype=np.float32), self.broken_reward if broken else 1.0, False, False, {}


class Image(Successful):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8)


class Unbounded(Successful):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


gym.register("successful", entry_point=Successful)  # without a time limit
for name, environment in {"echo": Echo, "image": Image, "unbounded": Unbounded}.items():
    gym.register(name, entry_point=environment, max_episode_steps=10)
for what in ("reward", "start"):
    gym.register(f"nan-{what}", entry_point=NotANumber, max_episode_steps=10, kwargs={"what": what})
kwargs = {"what": "reward", "broken_reward": 1e39}  # infinite in float32 only
gym.register("too-large-reward", entry_point=NotANumber, max_episode_steps=10, kwargs=kwargs)
