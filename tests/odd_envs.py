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


class Broken(Echo):
    """Gives a reward that is not a number at its seventh step, in training: evaluation has larger seeds."""

    def reset(self, *, seed=None, options=None):
        self.training = seed < 1000 if seed is not None else self.training
        return super().reset(seed=seed)

    def step(self, action):
        self.t += 1
        return np.zeros(3, dtype=np.float32), np.nan if self.t == 7 and self.training else 1.0, False, False, {}


class BrokenStart(Broken):
    """Gives a first observation that is not a number, in every training episode but the first."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation + np.float32(np.nan if seed is None and self.training else 0.0), info

    def step(self, action):
        return np.zeros(3, dtype=np.float32), 1.0, False, False, {}


class Unbounded(Successful):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


class Image(Successful):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8)


gym.register("successful", entry_point=Successful)  # without a time limit
gym.register("echo", entry_point=Echo, max_episode_steps=10)
gym.register("broken", entry_point=Broken, max_episode_steps=10)
gym.register("broken-start", entry_point=BrokenStart, max_episode_steps=10)
gym.register("unbounded", entry_point=Unbounded, max_episode_steps=5)
gym.register("image", entry_point=Image, max_episode_steps=5)
