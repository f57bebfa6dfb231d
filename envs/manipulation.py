"""Meta-World's ML10 as one contextual MDP: every episode draws one of ten tasks and one of that task's 50 goals.

The agent is told neither (Meta-World's goal-hiding protocol for meta-learning: the last three observations are zero).
Rewards, start states and success are Meta-World's own. An episode succeeds if any of its steps does.
"""

from functools import lru_cache

import gymnasium as gym
import metaworld
import numpy as np

from envs.context import choose_context

TASKS = {
    # The ten training tasks of ML10, in Meta-World's order, which the draw of the goals depends on.
    "ml10": (
        "reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-close-v3",
        "button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "sweep-v3", "basketball-v3",
    ),
    # Paper: its main text says ML10, its Appendix B.4.2 names these ten, three of which are not among ML10's.
    "ml10-appendix": (
        "reach-v3", "push-v3", "pick-place-v3", "sweep-into-v3", "basketball-v3",
        "drawer-close-v3", "window-open-v3", "button-press-v3", "dial-turn-v3", "peg-insert-side-v3",
    ),
}  # fmt: skip


@lru_cache(maxsize=None)  # drawing the goals builds every simulator, about ten seconds: once per process
def goals_of(names: tuple[str, ...], seed: int) -> tuple[type, dict[str, list]]:
    benchmark = metaworld.CustomML(list(names), [], seed=seed)
    goals = {name: [task for task in benchmark.train_tasks if task.env_name == name] for name in names}
    return benchmark.train_classes, goals


class MetaWorld(gym.Env):
    """Context: (index of the task, index of its goal). `benchmark_seed` fixes the 50 goals of each task, `reset` draws.

    Further arguments (`camera_name`, `width`, ...) go to Meta-World's simulators.
    """

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 80}

    def __init__(self, benchmark: str = "ml10", benchmark_seed: int = 0, render_mode: str | None = None, **kwargs):
        if benchmark not in TASKS:
            raise ValueError(f"unknown benchmark {benchmark!r}: there are {', '.join(TASKS)}")
        self.tasks = TASKS[benchmark]
        # Built here and not at the first reset: the worker processes of an asynchronous vector inherit it by fork.
        self.classes, self.goals = goals_of(self.tasks, benchmark_seed)
        self.simulators = {}  # by task, each built when it is first drawn
        self.simulator = None  # of the current episode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (39,), dtype=np.float64)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,), dtype=np.float32)
        self.render_mode, self.simulator_kwargs = render_mode, kwargs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        sizes = np.array([len(self.tasks), len(self.goals[self.tasks[0]])])
        self.context = choose_context(
            self.np_random.integers(sizes).astype(np.float64),
            options,
            lambda c: (c >= 0) & (c < sizes) & (c == np.floor(c)),
            f"the indices of a task (0 to {sizes[0] - 1}) and of a goal (0 to {sizes[1] - 1})",
        )
        task, goal = self.context.astype(int)
        self.task = self.tasks[task]
        if self.task not in self.simulators:
            self.simulators[self.task] = self.classes[self.task](render_mode=self.render_mode, **self.simulator_kwargs)
        self.simulator = self.simulators[self.task]
        self.simulator.set_task(self.goals[self.task][goal])
        observation, _ = self.simulator.reset()  # takes no seed: the start follows from the task and its goal
        return observation, {"context": self.context.copy(), "task": self.task, "success": 0.0}

    def step(self, action):
        observation, reward, terminated, truncated, info = self.simulator.step(action)
        info = {key: float(value) for key, value in info.items()}  # tasks differ: bool here, float there
        info.update(context=self.context.copy(), task=self.task)
        return observation, float(reward), terminated, truncated, info

    def render(self):
        return self.simulator.render()

    def close(self):
        for simulator in self.simulators.values():
            simulator.close()
