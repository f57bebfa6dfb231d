"""Saving and restoring the unfinished episodes of a vector of environments, so that a resumed run continues exactly.

The state of a simulator is not needed for that. An episode is determined by the state of the environment's random
generator before its reset and by the actions since: restoring it replays them, at most T steps. This is exact for every
environment that draws random numbers from its own generator only, as ours and Gymnasium's do.
"""

import gymnasium as gym
import numpy as np

from envs.context import ContextVector


class Restorable(gym.Wrapper):
    """Records how the current episode began and its actions. A reset with `replay` set repeats such an episode."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.episode = None  # (seed or state of the generator, actions), in plain Python
        self.replay = None

    def reset(self, *, seed=None, options=None):
        start, actions = (self.np_random.bit_generator.state if seed is None else seed), []
        if self.replay is not None:
            (start, actions), self.replay = self.replay, None
            if isinstance(start, dict):
                self.np_random.bit_generator.state = start
            else:
                seed = start
        self.episode = start, []
        observation, info = self.env.reset(seed=seed, options=options)
        for action in actions:
            observation, *_, info = self.step(np.array(action, dtype=self.action_space.dtype))
        return observation, info

    def step(self, action):
        self.episode[1].append(np.asarray(action).tolist())
        return self.env.step(action)


def get_state(vec: gym.vector.VectorEnv) -> dict | list:
    """The unfinished episodes of an environment made by `make_vec`, in plain Python."""
    return vec.get_state() if isinstance(vec, ContextVector) else list(vec.get_attr("episode"))


def set_state(vec: gym.vector.VectorEnv, state: dict | list) -> np.ndarray:
    """Restores such episodes and returns their current observations."""
    if isinstance(vec, ContextVector):
        return vec.set_state(state)
    vec.set_attr("replay", state)
    return vec.reset()[0]
