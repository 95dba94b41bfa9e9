"""The autoencoder: tokens on their way in, hidden in spans, and to latents and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mobatlas.data.types import BOS, EOS, HOME, MASK, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.latent_diffusion.autoencoder import (
    Autoencoder,
    AutoencoderConfig,
    hide_spans,
)
from mobatlas.generators.transformer import with_end
from tests.networks import LATENT, LENGTH, VOCABULARY, chance


def some_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Padded trajectories of 1 to `length` tokens; the first has one token, the last all."""
    lengths = torch.randint(1, length + 1, (rows,), generator=chance(seed))
    lengths[0] = 1
    lengths[-1] = length
    tokens = torch.randint(HOME, VOCABULARY, (rows, length), generator=chance(seed + 1))
    return torch.where(torch.arange(length) < lengths[:, None], tokens, PAD)


@pytest.fixture(scope="module")
def autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    config = AutoencoderConfig(encoder_layers=2, width=32, feedforward=64, latent=LATENT)
    return Autoencoder(config, VOCABULARY, LENGTH).eval().requires_grad_(False)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 9))
def test_each_trajectory_is_followed_by_one_end_if_there_is_room(
    lengths: list[int], length: int
) -> None:
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, n in enumerate(lengths):
        tokens[row, :n] = torch.arange(HOME, HOME + n)
    ended = with_end(tokens, length)
    assert ended.shape[1] <= length
    for row, n in enumerate(lengths):
        expected = [*range(HOME, HOME + n), EOS][:length]
        assert ended[row].tolist() == expected + [PAD] * (ended.shape[1] - len(expected))


def test_adding_an_end_does_not_change_the_other_tokens() -> None:
    tokens = some_tokens(20, 6)
    before = tokens.clone()
    with_end(tokens, 8)
    with_end(tokens, 6)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_about_the_requested_share_of_tokens_is_hidden(share: float) -> None:
    torch.manual_seed(0)
    hidden = hide_spans(torch.full((400, 200), HOME), share, 3.0) == MASK
    assert float(hidden.float().mean()) == pytest.approx(
        share, rel=0.15
    )  # spans that overlap hide fewer


def test_ends_and_padding_are_never_hidden_and_other_tokens_stay() -> None:
    torch.manual_seed(0)
    tokens = with_end(some_tokens(500, LENGTH), LENGTH)
    seen = hide_spans(tokens, 0.9, 3.0)
    changed = seen != tokens
    assert set(seen[changed].tolist()) == {MASK}
    assert int(tokens[changed].min()) >= HOME
    assert float(changed[tokens >= HOME].float().mean()) > 0.4


def test_a_share_of_zero_hides_nothing() -> None:
    tokens = some_tokens(50, LENGTH)
    assert torch.equal(hide_spans(tokens, 0.0, 3.0), tokens)


@pytest.mark.parametrize("mean", [1.0, 3.0, 8.0])
def test_hidden_spans_have_about_the_requested_length(mean: float) -> None:
    torch.manual_seed(0)
    hidden = hide_spans(torch.full((2_000, 100), HOME), 0.05, mean) == MASK
    begins = hidden & ~torch.nn.functional.pad(hidden[:, :-1], (1, 0))
    length = float(hidden.sum() / begins.sum())
    assert length == pytest.approx(
        max(mean, 1.4), rel=0.25
    )  # a span hides one token at least, and two may meet


def test_latents_are_zero_at_padding_and_nowhere_else(autoencoder: Autoencoder) -> None:
    tokens = with_end(some_tokens(40, LENGTH), LENGTH)
    latents = autoencoder.encode(tokens)
    assert latents.shape == (40, LENGTH, LATENT)
    assert torch.equal((latents == 0).all(-1), tokens == PAD)


def test_latents_do_not_depend_on_how_much_padding_there_is(autoencoder: Autoencoder) -> None:
    tokens = with_end(some_tokens(40, 5), LENGTH)  # (40, 6)
    padded = torch.nn.functional.pad(tokens, (0, LENGTH - 6), value=PAD)
    narrow = autoencoder.encode(tokens)
    wide = autoencoder.encode(padded)
    torch.testing.assert_close(autoencoder.all_places(narrow), wide, atol=1e-5, rtol=1e-5)
    alone = autoencoder.encode(tokens[:1, :2])  # a token and the end
    torch.testing.assert_close(alone, narrow[:1, :2], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(64, LENGTH, LATENT, generator=chance(4))


def check_trajectories(tokens: Tensor) -> Tensor:
    """Whole trajectories of real tokens, padding only after them; returns their lengths."""
    lengths = (tokens != PAD).sum(1)
    assert tokens.shape[1] == LENGTH
    assert int(lengths.min()) >= 1
    assert torch.equal(tokens != PAD, torch.arange(LENGTH) < lengths[:, None])
    assert not set(tokens.flatten().tolist()) & {BOS, MASK, EOS}
    return lengths


def test_decoding_with_and_without_a_cache_agree(autoencoder: Autoencoder, latents: Tensor) -> None:
    tokens = autoencoder.decode(latents, cache=True)
    assert torch.equal(tokens, autoencoder.decode(latents, cache=False))
    assert len(set(check_trajectories(tokens).tolist())) > 3, (
        "they should end at different places, or little is compared"
    )


def test_decoding_takes_the_likeliest_tokens_of_teacher_forcing(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    written = with_end(autoencoder.decode(latents), LENGTH)
    logits = autoencoder.logits(latents, written)
    logits[..., [PAD, BOS, MASK]] = -torch.inf
    logits[:, 0, EOS] = -torch.inf
    assert torch.equal(logits.argmax(-1)[written != PAD], written[written != PAD])


def test_drawn_tokens_have_the_frequencies_of_their_probabilities(
    autoencoder: Autoencoder,
) -> None:
    """Compare first tokens from equal latents; forbidden tokens are left out."""
    rows = 4_000
    latent = torch.randn(1, LENGTH, LATENT, generator=chance(5))
    drawn = autoencoder.decode(latent.expand(rows, -1, -1), noise=chance(6))
    check_trajectories(drawn)
    logits = autoencoder.logits(latent, drawn[:1])[0, 0]
    logits[[PAD, BOS, MASK, EOS]] = -torch.inf
    expected = rows * logits.softmax(-1)
    counts = drawn[:, 0].bincount(minlength=VOCABULARY)
    assert float(expected.max()) < rows / 2, "one token takes it all, and nothing is compared"
    assert float(((counts - expected).abs() / (expected + 1).sqrt()).max()) < 4.5
    assert not torch.equal(drawn[:2], autoencoder.decode(latent.expand(2, -1, -1), noise=chance(7)))


def test_a_decoder_without_probabilities_is_refused(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    bias = autoencoder.bart.final_logits_bias
    try:
        bias[0, HOME] = torch.inf
        with pytest.raises(MobatlasError, match="train it again"):
            autoencoder.decode(latents, noise=chance(9))
    finally:
        bias.zero_()


def test_decoding_never_writes_tokens_that_trajectories_do_not_contain(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    """The bias of the decoder asks for padding, start, mask and end before anything else."""
    bias = autoencoder.bart.final_logits_bias
    try:
        bias[0, [PAD, BOS, MASK, EOS]] = 1e4
        assert check_trajectories(autoencoder.decode(latents)).tolist() == [1] * 64
        assert check_trajectories(autoencoder.decode(latents, beams=2)).tolist() == [1] * 64
    finally:
        bias.zero_()


def log_likelihood(autoencoder: Autoencoder, latents: Tensor, tokens: Tensor) -> Tensor:
    """Of trajectories with their ends, under the bans of the decoder."""
    written = with_end(tokens, LENGTH)
    logits = autoencoder.logits(latents, written)
    logits = logits.log_softmax(-1)  # as beam search does it: first normalised, then banned
    chosen = logits.gather(-1, written[..., None]).squeeze(-1)
    return (chosen * (written != PAD)).sum(1)


def test_beams_find_trajectories_at_least_as_likely(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    bias = autoencoder.bart.final_logits_bias
    try:
        bias[0, EOS] = -1e4  # all of one length, so that likelihoods compare
        greedy, beams = (autoencoder.decode(latents, beams=beams) for beams in (1, 6))
    finally:
        bias.zero_()
    check_trajectories(beams)
    gain = log_likelihood(autoencoder, latents, beams) - log_likelihood(
        autoencoder, latents, greedy
    )
    assert float(gain.mean()) > 0
    assert float((gain >= -1e-4).float().mean()) > 0.9  # a beam may lose the greedy path, seldom


def test_restoring_standardised_latents_returns_the_latents(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    autoencoder.mean.copy_(torch.linspace(-1, 2, LATENT))
    autoencoder.deviation.copy_(torch.linspace(0.1, 3, LATENT))
    torch.testing.assert_close(autoencoder.restore(autoencoder.standardise(latents)), latents)
    torch.testing.assert_close(autoencoder.restore(autoencoder.padding), torch.zeros(LATENT))
    autoencoder.mean.zero_()
    autoencoder.deviation.fill_(1)
