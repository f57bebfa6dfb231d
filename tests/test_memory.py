"""The memories that the scripts train: in parallel over time and step by step, they are the same function."""

import pytest
import torch
from conftest import script

X, D, T = 7, 16, 12
MEMORIES = ["ddqn_mate", "ddqn_lstm", "ddqn_gpt2"]  # equal to the SAC scripts' by test_sections.py


def make(name):
    torch.manual_seed(0)
    return script(name).Memory(X, D, T).double()  # double, so that "equal" can mean equal


@pytest.mark.parametrize("name", [*MEMORIES, "sac_markov"])
@torch.no_grad()
def test_forward_equals_unrolled_steps_with_episodes_ending_at_different_times(name):
    """Four environments run through episodes of different lengths, each reset on its own, for 60 steps.

    `step` knows the past alone, so that in `forward`, too, later transitions never change earlier memories.
    """
    memory, environments = make(name), []
    for lengths in ([T, 3, 1, T, 7, T, T, T], [1] * 60, [5, T, 2, T, T, T, T], [T] * 5):
        episodes, ends = [torch.randn(n, X).double() for n in lengths], [torch.arange(n) == n - 1 for n in lengths]
        m = [memory(x[None])[0] for x in episodes]  # (n + 1, D) each
        streams = episodes, [each[:-1] for each in m], [each[1:] for each in m], ends
        environments.append([torch.cat(parts)[:60] for parts in streams])
    x, before, after, ended = map(torch.stack, zip(*environments))  # (4, 60, ...)
    state = memory.initial_state(4)
    for t in range(60):
        torch.testing.assert_close(memory.read(state), before[:, t], rtol=1e-10, atol=1e-10)
        state = memory.step(x[:, t], state)
        torch.testing.assert_close(memory.read(state), after[:, t], rtol=1e-10, atol=1e-10)
        state = memory.reset(state, ended[:, t])


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
    normed = torch.nn.functional.layer_norm(h, (D,), norm.weight, norm.bias)
    q, k, v = (normed @ linear.weight.T + linear.bias).split(D, -1)
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
