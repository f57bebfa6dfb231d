"""The episodes under way in a vector of environments, saved and restored, so that a resumed run goes on where it was.

A simulator's state need not be known for that. An episode follows from the state of the environment's generator before
its reset and from the actions since: restoring replays them, at most T steps. This is exact for every environment that
draws only from its own generator, as ours and Gymnasium's do.
"""

import multiprocessing
import os

import gymnasium as gym

from envs.context import ContextVector


class Restorable(gym.Wrapper):
    """Remembers how its episode began, and replays one when it is reset with `replay` set."""

    def __init__(self, env):
        super().__init__(env)
        self.beginning = None  # a seed, or the generator's state
        self.replay = None  # such a beginning, and the actions since
        if multiprocessing.parent_process() is not None:  # a worker: leave the group that Ctrl-C and schedulers signal,
            os.setpgrp()  # so that the main process is the one to stop, and still has its workers while it saves

    def reset(self, *, seed=None, options=None):
        if self.replay is None:
            self.beginning, actions = (self.np_random.bit_generator.state if seed is None else seed), []
        else:
            (self.beginning, actions), self.replay = self.replay, None
            if isinstance(self.beginning, dict):
                self.np_random.bit_generator.state = self.beginning
            else:
                seed = self.beginning
        observation, info = self.env.reset(seed=seed, options=options)
        for action in actions:
            observation, *_, info = self.env.step(action)
        return observation, info


def get_state(vec):
    """In plain Python, so that it can be saved with anything."""
    return vec.get_state() if isinstance(vec, ContextVector) else list(vec.get_attr("beginning"))


def set_state(vec, state, actions):
    """The observations that come next. `actions` are those taken in each environment since its episode began."""
    if isinstance(vec, ContextVector):
        return vec.set_state(state)
    vec.set_attr("replay", list(zip(state, actions)))
    return vec.reset()[0]
