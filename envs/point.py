"""Point robot: a point in the plane looks for a goal on the unit circle that only the reward reveals.

Not in the paper. It is the classic first task of meta-RL and our CartPole: minutes on one core show whether a memory
works. Without memory an agent can do no better than about -50, the return of staying near the origin.
"""

import gymnasium as gym
import numpy as np

from envs.context import ContextVector, choose_context

STEP = 0.1  # how far an action of length 1 goes


def draw_context(generator, options):
    """On the unit circle when drawn; a goal anywhere in the plane may be asked for."""
    angle = generator.uniform(0, 2 * np.pi)
    return choose_context(np.array([np.cos(angle), np.sin(angle)]), options)


def move(position, action, goal):
    """Works on one point, (2,), and on many, (N, 2). Reward: minus the distance to the goal, after the move."""
    position = position + STEP * np.clip(action, -1.0, 1.0).astype(np.float64)
    dx, dy = np.moveaxis(position - goal, -1, 0)
    return position, -np.sqrt(dx * dx + dy * dy)


class PointRobot(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context = draw_context(self.np_random, options)
        self.position = np.zeros(2)
        return self.position.astype(np.float32), {"context": self.context.copy()}

    def step(self, action):
        self.position, reward = move(self.position, action, self.context)
        return self.position.astype(np.float32), float(reward), False, False, {"context": self.context.copy()}

    def render(self):
        """The circle that goals are drawn from in grey, the goal in green, the point in orange."""
        y, x = np.mgrid[1.5:-1.5:240j, -1.5:1.5:240j]
        image = np.full((240, 240, 3), 30, dtype=np.uint8)
        image[abs(np.hypot(x, y) - 1) < 0.01] = 110
        for (px, py), radius, colour in ((self.context, 0.1, (60, 170, 90)), (self.position, 0.06, (240, 150, 40))):
            image[np.hypot(x - px, y - py) < radius] = colour
        return image


class PointRobotVector(ContextVector):
    """The same in NumPy, many at once."""

    def __init__(self, num_envs: int, max_episode_steps: int = 50, render_mode: str | None = None):
        super().__init__(num_envs, PointRobot(), 2, render_mode)  # context: the goal
        self.max_episode_steps = max_episode_steps
        self.position = np.zeros((num_envs, 2))

    def begin(self, which, options=None):
        for i in which:
            self.contexts[i] = draw_context(self.generators[i], options)
        self.t[which], self.position[which] = 0, 0.0
        return self.position[which].astype(np.float32)

    def step(self, actions):
        self.position, rewards = move(self.position, actions, self.contexts)
        self.t += 1
        truncated = self.t == self.max_episode_steps
        return self.finish_step(self.position.astype(np.float32), rewards, np.zeros_like(truncated), truncated)
