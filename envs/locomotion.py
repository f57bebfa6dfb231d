"""Gymnasium's MuJoCo robots with a hidden context: a direction, a speed, or the robot's own physical parameters.

Each class changes the forward reward or the model's parameters of its v5 parent. cheetah-vel also has half its parent's
control cost, as is usual in meta-RL.
"""

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv
from gymnasium.utils import EzPickle

from envs.context import choose_context


class Contextual:
    """Mixin for a MujocoEnv: `begin_context` draws a context at every reset, every info reports it."""

    def begin_context(self, options: dict | None) -> np.ndarray:
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)  # seeds the generator, which both the context and the start state come from
        self.context = self.begin_context(options)
        observation, info = super().reset(options=options)
        return observation, {**info, "context": self.context.copy()}

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info["context"] = self.context.copy()  # a copy, which the caller may keep or change
        return observation, reward, terminated, truncated, info


class AntDir(Contextual, AntEnv):
    """Ant-v5 whose forward reward is the planar velocity along a hidden direction. Context: that unit vector."""

    def __init__(self, angle_range: tuple[float, float] = (0.0, 2 * np.pi), **kwargs):
        super().__init__(**kwargs)
        EzPickle.__init__(self, angle_range=angle_range, **kwargs)
        self.angle_range = angle_range

    def begin_context(self, options):
        angle = self.np_random.uniform(*self.angle_range)
        direction = np.array([np.cos(angle), np.sin(angle)])
        return choose_context(direction, options, lambda c: np.isclose(np.linalg.norm(c), 1), "a unit vector")

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        x, y = self.context
        info["reward_forward"] = self._forward_reward_weight * (x * info["x_velocity"] + y * info["y_velocity"])
        reward = info["reward_forward"] + info["reward_survive"] + info["reward_ctrl"] + info["reward_contact"]
        return observation, reward, terminated, truncated, info


class CheetahVel(Contextual, HalfCheetahEnv):
    """HalfCheetah-v5 rewarded for running at a hidden speed: -|v - v*| - 0.05 ||a||^2. Context: v*, in m/s."""

    def __init__(self, velocity_range: tuple[float, float] = (0.0, 3.0), ctrl_cost_weight: float = 0.05, **kwargs):
        super().__init__(ctrl_cost_weight=ctrl_cost_weight, **kwargs)
        EzPickle.__init__(self, velocity_range=velocity_range, ctrl_cost_weight=ctrl_cost_weight, **kwargs)
        self.velocity_range = velocity_range

    def begin_context(self, options):
        return choose_context(self.np_random.uniform(*self.velocity_range, size=1), options)

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        info["reward_forward"] = -self._forward_reward_weight * abs(info["x_velocity"] - self.context[0])
        return observation, info["reward_forward"] + info["reward_ctrl"], terminated, truncated, info


class Parametric(Contextual):
    """Mixin that multiplies every element of the model's parameters by base ** U(-exponent, exponent).

    Context: the multipliers of body_mass, body_inertia, dof_damping and geom_friction, flattened in that order.
    Ranges as in the rand-param tasks of PEARL and its successors; the paper names the parameters and gives no ranges.
    """

    def __init__(
        self,
        mass_base: float = 1.5,
        damping_base: float = 1.3,
        friction_base: float = 1.5,
        exponent: float = 3.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        bases = {"mass_base": mass_base, "damping_base": damping_base, "friction_base": friction_base}
        EzPickle.__init__(self, exponent=exponent, **bases, **kwargs)
        self.exponent = exponent
        self.bases = {
            "body_mass": mass_base,
            "body_inertia": mass_base,
            "dof_damping": damping_base,
            "geom_friction": friction_base,
        }
        self.nominal = {name: getattr(self.model, name).copy() for name in self.bases}

    def begin_context(self, options):
        drawn = [
            base ** self.np_random.uniform(-self.exponent, self.exponent, self.nominal[name].size)
            for name, base in self.bases.items()
        ]
        context = choose_context(
            np.concatenate(drawn), options, lambda c: np.isfinite(c) & (c > 0), "positive multipliers"
        )
        start = 0
        for name, nominal in self.nominal.items():  # from the nominal values, or scales would compound over episodes
            multipliers = context[start : start + nominal.size].reshape(nominal.shape)
            getattr(self.model, name)[:] = nominal * multipliers
            start += nominal.size
        # Recomputes the constants that MuJoCo derives from these. It overwrites the state, which reset then sets anew.
        mujoco.mj_setConst(self.model, self.data)
        return context


class WalkerParam(Parametric, Walker2dEnv):
    """Walker2d-v5, its reward unchanged, with hidden mass, inertia, damping and friction."""


class HopperParam(Parametric, HopperEnv):
    """Hopper-v5, its reward unchanged, with hidden mass, inertia, damping and friction."""
