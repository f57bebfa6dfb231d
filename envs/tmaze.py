"""T-Maze (paper, Appendix B.4.3): see the goal's side at the oracle, remember it down the corridor, turn at its end.

                                  G1   goal +1      cells 0 (oracle) to L (junction), one goal above the junction
    O ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ J                 and one below; actions 0 right, 1 up, 2 left, 3 down;
                                  G2   goal -1      a move into a wall stays where it is

Passive: starts at the oracle, T = L + 1. Active: starts at cell 1, T = L + 2, and must first go back to look.
The best return is exactly 1, the best without memory 0.5 in expectation, and never leaving a passive start gives -1.
"""

import gymnasium as gym
import numpy as np

from envs.context import ContextVector, choose_context

RIGHT, UP, LEFT, DOWN = range(4)
DX, DY = np.array([1, 0, -1, 0]), np.array([0, 1, 0, -1])


def observe(cell, y, cue, corridor_length):
    """(x, y, cue): x and y in cells from the junction; the cue is L if the goal is above, -L if below, 0 if not shown.

    Paper: "2-dimensional coordinates", no scale. Here: cells, because the scale decides how fast anything is learned.
    The agent must tell the junction from the cell before it, which x / L makes too similar in a long corridor, and find
    a cue of one step in the sum over L steps, where a cue of 1 is lost among positions of up to L.
    """
    x = cell - corridor_length
    return np.stack([x, y, cue * corridor_length], axis=-1).astype(np.float32)


def draw_side(generator):
    return 1.0 if generator.random() < 0.5 else -1.0


def draw_context(generator, options):
    drawn = np.array([draw_side(generator)])
    return choose_context(drawn, options, lambda c: abs(c) == 1, "1 (goal above) or -1 (goal below)")


class TMaze(gym.Env):
    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 10}

    def __init__(self, corridor_length: int = 200, active: bool = False, render_mode: str | None = None):
        if not isinstance(corridor_length, (int, np.integer)) or corridor_length < 2:
            raise ValueError(f"the corridor length must be a whole number, 2 or more, got {corridor_length}")
        low, high = [-corridor_length, -1, -corridor_length], [0, 1, corridor_length]
        self.observation_space = gym.spaces.Box(np.float32(low), np.float32(high))
        self.action_space = gym.spaces.Discrete(4)
        self.corridor_length, self.active, self.render_mode = corridor_length, active, render_mode
        self.horizon = corridor_length + (2 if active else 1)  # T, just enough for the best policy

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context = draw_context(self.np_random, options)
        self.goal = self.context[0]
        self.t, self.cell, self.y = 0, 1 if self.active else 0, 0
        # Active: what the start shows looks like the oracle's cue and means nothing.
        self.cue = draw_side(self.np_random) if self.active else self.goal
        return observe(self.cell, self.y, self.cue, self.corridor_length), {"context": self.context.copy()}

    def step(self, action):
        before, dx, dy = self.cell, int(DX[action]), int(DY[action])
        if self.active and self.t == 0:
            dx = min(dx, 0)  # the way to the junction is blocked at first, so going to look costs one step, not two
        if self.cell == self.corridor_length:
            self.y = dy
        self.cell = min(max(self.cell + dx, 0), self.corridor_length)
        self.cue = self.goal if self.cell == 0 else 0.0
        self.t += 1

        terminated = self.y != 0 or self.t == self.horizon
        if terminated:
            reward = float(self.y == self.goal)  # the goal's reward alone: the turn itself is never penalised
        elif self.active and self.t == 1:
            reward = 0.0  # free, or the step back to the oracle would cost the best policy 2 / L
        else:
            # Paper: (1 - (x_t - x_{t-1})) / L, without saying on which side of a_t x_t lies. Here: the velocity of
            # this very step, for in a contextual MDP the reward is drawn from p(s', r | s, a, c).
            reward = -(1 - (self.cell - before)) / self.corridor_length
        observation = observe(self.cell, self.y, self.cue, self.corridor_length)
        return observation, reward, terminated, False, {"context": self.context.copy()}

    def render(self):
        return self.render_text() if self.render_mode == "ansi" else self.render_image()

    def render_text(self):
        above, below = ("G", "x") if self.goal > 0 else ("x", "G")  # G the true goal
        branch = {1: above, 0: "", -1: below}
        rows = {y: list(" " * self.corridor_length + branch[y]) for y in (1, -1)}
        rows[0] = list("O" + "-" * (self.corridor_length - 1) + "+")
        rows[self.y][self.cell] = "A"
        lines = ["".join(rows[y]) for y in (1, 0, -1)]
        return "\n".join(lines) + f"\nstep {self.t} of {self.horizon}, cue {self.cue:+.0f}\n"

    def render_image(self):
        """Blue oracle, green true goal, grey other goal, orange agent with an arrow for the cue that it sees,
        white for the oracle's and black for the one at an active start, which means nothing."""
        size = 48  # of a marker; a long corridor is drawn with narrower cells, never with smaller markers
        pitch = max(960 // (self.corridor_length + 1), 1) if self.corridor_length > 19 else size
        image = np.full((5 * size, self.corridor_length * pitch + 3 * size, 3), 30, dtype=np.uint8)
        row, column = np.indices(image.shape[:2])

        def centre(cell, y):
            return 5 * size // 2 - y * size, 3 * size // 2 + cell * pitch

        def square(cell, y, colour, side=size):
            r, c = centre(cell, y)
            image[(abs(row - r) <= side // 2) & (abs(column - c) <= side // 2)] = colour

        image[(abs(row - centre(0, 0)[0]) <= size // 2) & (column > size) & (column < image.shape[1] - size)] = 200
        square(0, 0, (60, 120, 216))
        for y in (1, -1):
            square(self.corridor_length, y, (60, 170, 90) if y == self.goal else (110, 110, 110))
        r, c = centre(self.cell, self.y)
        image[(row - r) ** 2 + (column - c) ** 2 <= (0.42 * size) ** 2] = (240, 150, 40)
        if self.cue:
            height = self.cue * (r - row) + size // 5  # 0 at the arrow's base, growing in the direction it points
            image[(height >= 0) & (abs(column - c) <= (0.4 * size - height) * 0.7)] = 255 if self.cell == 0 else 0
        return image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2]  # video codecs want even sides


class TMazeVector(ContextVector):
    """The same maze in NumPy, many at once."""

    def __init__(self, num_envs: int, corridor_length: int = 200, active: bool = False, render_mode: str | None = None):
        super().__init__(num_envs, TMaze(corridor_length, active), 1, render_mode)  # context: the goal's side
        self.corridor_length, self.active, self.horizon = corridor_length, active, self.single.horizon
        self.cell = np.zeros(num_envs, dtype=np.int64)

    def begin(self, which, options=None):
        cues = np.empty(len(which))
        for n, i in enumerate(which):
            self.contexts[i] = draw_context(self.generators[i], options)
            cues[n] = draw_side(self.generators[i]) if self.active else self.contexts[i, 0]
        self.t[which], self.cell[which] = 0, 1 if self.active else 0
        return observe(self.cell[which], np.zeros(len(which)), cues, self.corridor_length)

    def step(self, actions):
        before, goal, dx, dy = self.cell, self.contexts[:, 0], DX[actions], DY[actions]
        if self.active:
            dx = np.where(self.t == 0, np.minimum(dx, 0), dx)
        y = np.where(before == self.corridor_length, dy, 0)
        self.cell = np.clip(before + dx, 0, self.corridor_length)
        cue = np.where(self.cell == 0, goal, 0.0)
        self.t += 1

        terminated = (y != 0) | (self.t == self.horizon)
        rewards = -(1 - (self.cell - before)) / self.corridor_length
        if self.active:
            rewards[self.t == 1] = 0.0
        rewards = np.where(terminated, y == goal, rewards)
        observations = observe(self.cell, y, cue, self.corridor_length)
        return self.finish_step(observations, rewards, terminated, np.zeros_like(terminated))
