"""An update of every script: what it moves, where its tensors live, and in which precision it computes."""

import contextlib
import copy

import pytest
import torch
from conftest import DDQN, SCRIPTS, A, T, make_batch, make_update, script, update
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_update_moves_every_parameter_and_the_target_by_tau(name):
    parts = make_update(name)
    _, agent, target, *_ = parts
    before, target_before = copy.deepcopy(agent), copy.deepcopy(target)
    update(parts, make_batch(name))
    for (key, new), old in zip(agent.named_parameters(), before.parameters()):
        assert not torch.equal(new, old), key
    online = agent if name in DDQN else agent.critics
    for new, old, fast in zip(target.parameters(), target_before.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * fast)
        assert new.grad is None


class OneDevice(TorchDispatchMode):
    """Raises where an operation mixes devices, as CUDA would; numbers (no dimensions) and copies may."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and a.ndim]
        assert len({tensor.device for tensor in tensors}) <= 1 or "copy" in function.__name__, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left_on_the_cpu(name, monkeypatch):
    """The device "meta" computes shapes alone, which is enough to see where every tensor lives."""
    module, agent, target, _, args = make_update(name)
    agent, target = agent.to("meta"), target.to("meta")
    optimizer = torch.optim.Adam(agent.parameters())
    batch = {key: value.to("meta") for key, value in make_batch(name).items()}
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: contextlib.nullcontext())  # knows no "meta"
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: T)  # GPT-2 reads the longest episode from the device
    memory, obs = agent.memory, batch["obs"][:, 0]
    x = module.transition(obs, batch["action"][:, 0], batch["reward"][:, 0], batch["obs"][:, 1])
    with OneDevice():
        metrics = module.update(agent, target, optimizer, batch, args)
        with torch.no_grad():
            state = memory.reset(memory.step(x, memory.initial_state(4)), torch.zeros(4, dtype=bool, device="meta"))
            m = memory.read(state)
            actions = [agent.act(obs, m), agent.explore(obs, m, *[0.5] * (name in DDQN))]
            actions += [] if name in DDQN else [agent.random(obs, m)]
    state = state if isinstance(state, tuple) else (state,)
    assert {tensor.device.type for tensor in (m, *state, *actions, *metrics.values())} == {"meta"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bf16_changes_the_precision_of_the_forward_passes_alone(name):
    batch = {key: value.float() for key, value in make_batch(name).items()}
    noise, outcomes, dtypes = torch.randn(4, T + 1, A), [], []
    for bf16 in (False, True):
        parts = make_update(name, bf16=bf16)
        agent, _ = parts[1].float(), parts[2].float()
        for network in (agent.memory, agent.q if name in DDQN else agent.actor):
            network.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
        metrics = update(parts, batch, noise)
        for value in (*metrics.values(), *agent.parameters(), *(p.grad for p in agent.parameters())):
            assert value.dtype == torch.float32
        outcomes.append((metrics, torch.cat([p.grad.flatten() for p in agent.parameters()])))
    assert dtypes[:2] == [torch.float32] * 2 and dtypes[3] == torch.bfloat16
    assert dtypes[2] == torch.float32 or "mate" not in name, "MATE's sum is not rounded"
    (metrics, gradient), (rounded, rounded_gradient) = outcomes
    torch.testing.assert_close(rounded, metrics, rtol=0.03, atol=0.01)
    assert torch.cosine_similarity(rounded_gradient, gradient, dim=0) > 0.99
    assert not torch.equal(rounded_gradient, gradient) and script(name).Args().bf16 is False
