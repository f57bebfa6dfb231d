"""The memories that the scripts train: in parallel over time and step by step, they are the same function."""

import pytest
import torch
from conftest import script

X, D, T = 7, 16, 12
MEMORIES = ["ddqn_mate", "ddqn_lstm", "ddqn_gpt2"]  # equal to the SAC scripts' by test_sections.py
ALL = MEMORIES + ["sac_markov"]


def make(name):
    torch.manual_seed(0)
    return script(name).Memory(X, D, T).double()  # double, so that "equal" can mean equal


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_forward_equals_unrolled_steps_with_episodes_ending_at_different_times(name):
    """Four environments run through episodes of different lengths, each reset on its own, for 60 steps."""
    memory, generator = make(name), torch.Generator().manual_seed(1)
    lengths = [[T, 3, 1, T, 7, T, T, T], [1] * 60, [5, T, 2, T, T, T, T], [T] * 6]
    episodes = [[torch.randn(n, X, generator=generator).double() for n in lengths[i]] for i in range(4)]
    expected = [[memory(x[None])[0] for x in episodes[i]] for i in range(4)]  # (n + 1, D) each
    state, episode, t = memory.initial_state(4), [0] * 4, [0] * 4

    def assert_memories_are_those_of_forward():
        read = memory.read(state)
        for i in range(4):
            torch.testing.assert_close(read[i], expected[i][episode[i]][t[i]], rtol=1e-10, atol=1e-10)

    for _ in range(60):
        assert_memories_are_those_of_forward()
        state = memory.step(torch.stack([episodes[i][episode[i]][t[i]] for i in range(4)]), state)
        t = [n + 1 for n in t]
        assert_memories_are_those_of_forward()
        ended = [t[i] == lengths[i][episode[i]] for i in range(4)]
        episode, t = [k + end for k, end in zip(episode, ended)], [0 if end else n for n, end in zip(t, ended)]
        state = memory.reset(state, torch.tensor(ended))


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_forward_equals_unrolled_steps_in_the_precision_and_the_size_of_a_run(name):
    """In single precision, and large enough, the LSTM's forward is another library's code than its steps."""
    torch.manual_seed(0)
    memory, x = script(name).Memory(X, 128, 50), torch.randn(64, 50, X)
    m, state = memory(x), memory.initial_state(64)
    for t in range(50):
        torch.testing.assert_close(memory.read(state), m[:, t], rtol=1e-4, atol=1e-4)
        state = memory.step(x[:, t], state)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_later_transitions_never_change_earlier_memories(name):
    memory, x = make(name), torch.randn(3, T, X).double()
    before = memory(x)
    assert before.shape == (3, T + 1, memory.dim)
    for t in range(T):
        changed = x.clone()
        changed[:, t:] = torch.randn(3, T - t, X)  # x_{t+1} and all that follow
        after = memory(changed)
        torch.testing.assert_close(before[:, : t + 1], after[:, : t + 1], rtol=0, atol=0)
        if memory.dim:
            assert (before[:, t + 1 :] - after[:, t + 1 :]).abs().amax(-1).min() > 1e-6, "and they do change later ones"


@pytest.mark.parametrize("name", MEMORIES)
def test_every_parameter_is_trained(name):
    memory = make(name)
    memory(torch.randn(3, T, X).double()).pow(3).sum().backward()
    for key, parameter in memory.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@torch.no_grad()
def test_mate_is_the_formula_of_the_paper():
    """Eq. (6) and (11) written out with loops, and GPT-2's feed-forward block by hand."""
    memory, x = make("ddqn_mate"), torch.randn(2, 5, X).double()
    norm, up, _, down = memory.feed_forward

    def encode(x):
        e = memory.embed.weight @ x + memory.embed.bias
        h = (e - e.mean()) / (e.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        h = up.weight @ h + up.bias
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5))  # GELU
        return e + down.weight @ h + down.bias

    m = memory(x)
    for b in range(2):
        total = memory.Psi.clone()
        torch.testing.assert_close(m[b, 0], D**0.5 * total / total.norm())
        for t in range(5):
            total = total + encode(x[b, t])
            torch.testing.assert_close(m[b, t + 1], D**0.5 * total / total.norm())


@torch.no_grad()
def test_gpt2_is_one_causal_block_written_out():
    memory, x = make("ddqn_gpt2"), torch.randn(1, 5, X).double()
    angles = torch.arange(5)[:, None] / 10_000 ** (2 * torch.arange(D // 2) / D)
    positions = torch.zeros(5, D)
    positions[:, 0::2], positions[:, 1::2] = angles.sin(), angles.cos()
    h = memory.embed(x[0]) + positions
    norm, linear = memory.query_key_value
    q, k, v = (torch.nn.functional.layer_norm(h, (D,), norm.weight, norm.bias) @ linear.weight.T + linear.bias).split(
        D, -1
    )
    assert not memory(x)[0, 0].any()
    for t in range(5):
        weights = torch.softmax(k[: t + 1] @ q[t] / D**0.5, dim=0)
        out = h[t] + memory.attention_out(weights @ v[: t + 1])
        out = memory.final_norm(out + memory.feed_forward(out))
        torch.testing.assert_close(memory(x)[0, t + 1], out, rtol=1e-5, atol=1e-6)


def test_lstm_starts_from_orthogonal_weights_and_zero_biases():
    lstm = make("ddqn_lstm").lstm
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l0):  # (4D, D)
        torch.testing.assert_close(weight.T @ weight, torch.eye(D).double(), rtol=1e-5, atol=1e-5)
    assert not lstm.bias_ih_l0.any() and not lstm.bias_hh_l0.any()
