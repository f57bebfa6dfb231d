"""What all environments here share: how the hidden context of an episode is chosen, and a vector of them in NumPy."""

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


def choose_context(drawn: np.ndarray, options: dict | None, valid=np.isfinite, rule="finite numbers") -> np.ndarray:
    """`options["context"]` if the caller fixed one, else the one just drawn.

    The environment draws in both cases: with the same seed, fixing the context leaves all other randomness as it was.
    """
    context = drawn
    if options is not None and "context" in options:
        try:
            context = np.array(options["context"], dtype=np.float64)
        except (TypeError, ValueError):
            context = np.array(np.nan)
        if context.shape != drawn.shape or not np.all(valid(context)):
            given = np.array2string(np.asarray(options["context"]), threshold=6).replace("\n", "")
            raise ValueError(
                f"the context must be {rule}, of shape {drawn.shape}, got {given} of shape {context.shape}"
            )
    return context


class ContextVector(VectorEnv):
    """`num_envs` environments in NumPy, equal to the bit to a SyncVectorEnv of them in SAME_STEP mode.

    An environment that ends starts again in the same step: `step` returns the first observation of its next episode,
    and the last one of the old episode in `infos["final_obs"]`. A subclass has `begin` and `step`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, single: gym.Env, context_dim: int, render_mode: str | None):
        if render_mode is not None:
            raise ValueError('this vector environment cannot render: make it with vectorization_mode="sync" to render')
        self.metadata = single.metadata | self.metadata
        self.num_envs, self.single = num_envs, single  # single: for its spaces and constants, never stepped
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        self.generators = [np_random()[0] for _ in range(num_envs)]  # one each, as separate environments have
        self.contexts = np.zeros((num_envs, context_dim))
        self.t = np.zeros(num_envs, dtype=np.int64)  # steps taken in the current episode
        self.observations = np.zeros(self.observation_space.shape, dtype=self.observation_space.dtype)  # the last ones

    @property
    def np_random(self):
        return tuple(self.generators)

    def get_state(self):
        """Everything about the episodes under way, in plain Python."""
        arrays = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return arrays | {"generators": [generator.bit_generator.state for generator in self.generators]}

    def set_state(self, state):
        for generator, generator_state in zip(self.generators, state["generators"]):
            generator.bit_generator.state = generator_state
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                value[:] = state[name]
        return self.observations.copy()

    def begin(self, which: np.ndarray, options: dict | None = None) -> np.ndarray:
        """Starts new episodes in the environments with these indices: draws their contexts, returns observations."""
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, (int, np.integer)) else seed
            if len(seeds) != self.num_envs:
                raise ValueError(f"expected one seed or {self.num_envs} of them, got {len(seeds)}")
            self.generators = [g if s is None else np_random(int(s))[0] for g, s in zip(self.generators, seeds)]
        self.observations[:] = self.begin(np.arange(self.num_envs), options)
        return self.observations.copy(), self.info(np.ones(self.num_envs, dtype=bool))

    def finish_step(self, observations, rewards, terminated, truncated):
        """What `step` returns, after new episodes have begun where one ended."""
        ended, final = terminated | truncated, {}
        if ended.any():
            which = np.flatnonzero(ended)
            last = np.full(self.num_envs, None, dtype=object)
            for i in which:
                last[i] = observations[i].copy()
            final = {"final_obs": last, "final_info": self.info(ended)}
            final |= {"_final_obs": ended, "_final_info": ended.copy()}
            observations[which] = self.begin(which)
        self.observations[:] = observations
        return observations, rewards, terminated, truncated, self.info(np.ones_like(ended)) | final

    def info(self, has):
        return {"context": np.where(has[:, None], self.contexts, 0.0), "_context": has.copy()}
