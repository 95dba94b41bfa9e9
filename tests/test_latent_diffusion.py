"""The pieces of the paper's generator: autoencoder, noise and the way back, denoiser, latents on disk, configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mobatlas.config import build
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import BOS, EOS, FIRST_POI, HOME, MASK, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.base import Draw, unlabelled
from mobatlas.generators.latent_diffusion.autoencoder import Autoencoder, hide_spans, with_end
from mobatlas.generators.latent_diffusion.config import (
    PRESETS,
    AutoencoderConfig,
    DenoiserConfig,
    DiffusionConfig,
    LatentDiffusionConfig,
)
from mobatlas.generators.latent_diffusion.diffusion import noise_schedule, rollout
from mobatlas.generators.latent_diffusion.dit import Block, DiT, Estimate
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion
from mobatlas.generators.latent_diffusion.latents import encode_split, set_statistics
from mobatlas.generators.training import Share, Stage, Trainer
from mobatlas.groups import DEFAULT_GROUPS
from tests.tiny import OPTIONS, fresh, small_city

VOCABULARY, LENGTH, LATENT = 30, 12, 8
DDIM, DPM = DiffusionConfig(solver="ddim", steps=50), DiffusionConfig(solver="dpm++", steps=10)
DENOISER = DenoiserConfig(depth=2, width=32, heads=2, embedding=8)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Trajectories of 1 to `length` tokens, padded; the first has one token and the last has all."""
    lengths = torch.randint(1, length + 1, (rows,), generator=chance(seed))
    lengths[0], lengths[-1] = 1, length
    tokens = torch.randint(HOME, VOCABULARY, (rows, length), generator=chance(seed + 1))
    return torch.where(torch.arange(length) < lengths[:, None], tokens, PAD)


def stirred(network: nn.Module) -> nn.Module:
    """With weights unlike those it began with, so that nothing is hidden behind a zero."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=chance(parameter.numel())))
    return network.requires_grad_(False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


@pytest.fixture(scope="module")
def autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    config = AutoencoderConfig(encoder_layers=2, width=32, feedforward=64, latent=LATENT)
    return Autoencoder(config, VOCABULARY, LENGTH).eval().requires_grad_(False)


@pytest.fixture
def model(dataset: TrajectoryDataset) -> LatentDiffusion:
    made = fresh("latent-diffusion", dataset)
    assert isinstance(made, LatentDiffusion)
    return made


# ---- tokens on their way in


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 9))
def test_each_trajectory_is_followed_by_one_end_if_there_is_room(lengths: list[int], length: int) -> None:
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, n in enumerate(lengths):
        tokens[row, :n] = torch.arange(HOME, HOME + n)
    ended = with_end(tokens, length)
    assert ended.shape[1] <= length
    for row, n in enumerate(lengths):
        expected = [*range(HOME, HOME + n), EOS][:length]
        assert ended[row].tolist() == expected + [PAD] * (ended.shape[1] - len(expected))


def test_an_end_leaves_the_tokens_that_it_was_given_alone() -> None:
    tokens = some_tokens(20, 6)
    before = tokens.clone()
    with_end(tokens, 8)
    with_end(tokens, 6)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_about_the_asked_share_of_tokens_is_hidden(share: float) -> None:
    torch.manual_seed(0)
    hidden = hide_spans(torch.full((400, 200), HOME), share, 3.0) == MASK
    assert float(hidden.float().mean()) == pytest.approx(share, rel=0.15)  # spans that overlap hide fewer


def test_end_and_padding_are_never_hidden_and_what_is_not_hidden_stays() -> None:
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
def test_tokens_are_hidden_in_spans_of_about_the_asked_length(mean: float) -> None:
    torch.manual_seed(0)
    hidden = hide_spans(torch.full((2_000, 100), HOME), 0.05, mean) == MASK
    begins = hidden & ~torch.nn.functional.pad(hidden[:, :-1], (1, 0))
    length = float(hidden.sum() / begins.sum())
    assert length == pytest.approx(max(mean, 1.4), rel=0.25)  # a span hides one token at least, and two may meet


# ---- tokens to latents and back


def test_latents_are_zero_at_padding_and_nowhere_else(autoencoder: Autoencoder) -> None:
    tokens = with_end(some_tokens(40, LENGTH), LENGTH)
    latents = autoencoder.encode(tokens)
    assert latents.shape == (40, LENGTH, LATENT)
    assert torch.equal((latents == 0).all(-1), tokens == PAD)


def test_latents_do_not_depend_on_how_much_padding_there_is(autoencoder: Autoencoder) -> None:
    tokens = with_end(some_tokens(40, 5), LENGTH)  # (40, 6)
    padded = torch.nn.functional.pad(tokens, (0, LENGTH - 6), value=PAD)
    narrow, wide = autoencoder.encode(tokens), autoencoder.encode(padded)
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


def test_decoding_with_a_cache_is_decoding_without_one(autoencoder: Autoencoder, latents: Tensor) -> None:
    tokens = autoencoder.decode(latents, cache=True)
    assert torch.equal(tokens, autoencoder.decode(latents, cache=False))
    assert len(set(check_trajectories(tokens).tolist())) > 3, (
        "they should end at different places, or little is compared"
    )


def test_decoding_takes_what_teacher_forcing_finds_likeliest(autoencoder: Autoencoder, latents: Tensor) -> None:
    written = with_end(autoencoder.decode(latents), LENGTH)
    logits = autoencoder.logits(latents, written)
    logits[..., [PAD, BOS, MASK]] = -torch.inf
    logits[:, 0, EOS] = -torch.inf
    assert torch.equal(logits.argmax(-1)[written != PAD], written[written != PAD])


@pytest.mark.parametrize("beams", [1, 3])
def test_forced_lengths_are_kept(autoencoder: Autoencoder, latents: Tensor, beams: int) -> None:
    lengths = torch.arange(64) % LENGTH + 1
    assert torch.equal(check_trajectories(autoencoder.decode(latents, lengths, beams=beams)), lengths)


def test_nothing_but_trajectories_is_written_even_by_a_decoder_that_would_rather_not(
    autoencoder: Autoencoder, latents: Tensor
) -> None:
    """The bias of the decoder asks for padding, start, mask and end before anything else."""
    bias = autoencoder.bart.final_logits_bias
    try:
        bias[0, [PAD, BOS, MASK, EOS]] = 1e4
        assert check_trajectories(autoencoder.decode(latents)).tolist() == [1] * 64
        assert check_trajectories(autoencoder.decode(latents, beams=2)).tolist() == [1] * 64
        lengths = torch.full((64,), 7)
        assert torch.equal(check_trajectories(autoencoder.decode(latents, lengths)), lengths)
    finally:
        bias.zero_()


def log_likelihood(autoencoder: Autoencoder, latents: Tensor, tokens: Tensor) -> Tensor:
    """Of trajectories with their ends, under the bans of the decoder."""
    written = with_end(tokens, LENGTH)
    logits = autoencoder.logits(latents, written)
    logits = logits.log_softmax(-1)  # as beam search does it: first normalised, then banned
    chosen = logits.gather(-1, written[..., None]).squeeze(-1)
    return (chosen * (written != PAD)).sum(1)


def test_beams_find_trajectories_at_least_as_likely(autoencoder: Autoencoder, latents: Tensor) -> None:
    lengths = torch.full((64,), 6)  # of one length, so that likelihoods compare
    greedy, beams = (autoencoder.decode(latents, lengths, beams=beams) for beams in (1, 6))
    check_trajectories(beams)
    gain = log_likelihood(autoencoder, latents, beams) - log_likelihood(autoencoder, latents, greedy)
    assert float(gain.mean()) > 0
    assert float((gain >= -1e-4).float().mean()) > 0.9  # a beam may lose the greedy path, seldom


def test_standardised_latents_come_back(autoencoder: Autoencoder, latents: Tensor) -> None:
    autoencoder.mean.copy_(torch.linspace(-1, 2, LATENT))
    autoencoder.deviation.copy_(torch.linspace(0.1, 3, LATENT))
    torch.testing.assert_close(autoencoder.restore(autoencoder.standardise(latents)), latents)
    torch.testing.assert_close(autoencoder.restore(autoencoder.padding), torch.zeros(LATENT))
    autoencoder.mean.zero_()
    autoencoder.deviation.fill_(1)


# ---- the denoiser

ANCHORS = torch.tensor([[40.1, -74.0, 40.3, -73.8], [40.2, -74.1, 40.0, -74.2], [40.0, -73.9, 40.2, -74.0]])


def new_dit(**changes: Any) -> DiT:
    torch.manual_seed(1)
    made = DiT(DENOISER, LATENT, LENGTH, VOCABULARY, **changes).eval()
    made.prototypes.copy_(torch.randn(VOCABULARY, LATENT, generator=chance(5)))
    made.centre_on(ANCHORS.double().numpy())
    return made


def inputs(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, LENGTH, LATENT, generator=chance()), torch.tensor([3, 500, 990])[:rows], ANCHORS[:rows]


def test_a_new_block_is_the_identity() -> None:
    x, condition = torch.randn(3, LENGTH, 32), torch.randn(3, 32)
    assert torch.equal(Block(DENOISER)(x, condition), x)
    assert not torch.equal(stirred(Block(DENOISER))(x, condition), x)


def test_a_new_denoiser_predicts_the_mean_of_all_tokens() -> None:
    network = new_dit()
    torch.testing.assert_close(network(*inputs()).clean, network.prototypes.mean(0).expand(3, LENGTH, LATENT))


def test_without_cross_entropy_a_new_denoiser_predicts_zero() -> None:
    plain = DiT(DENOISER.model_copy(update={"cross_entropy": 0.0}), LATENT, LENGTH, VOCABULARY)(*inputs())
    assert torch.equal(plain.clean, torch.zeros(3, LENGTH, LATENT)) and plain.words is None


def test_a_sure_denoiser_predicts_the_latent_of_the_token() -> None:
    network = new_dit()
    assert network.words is not None
    with torch.no_grad():
        network.words.bias[17] = 60.0
    found = network(*inputs())
    torch.testing.assert_close(found.clean, network.prototypes[17].expand(3, LENGTH, LATENT))
    assert found.words is not None and bool((found.words.argmax(-1) == 17).all())


def test_unknown_anchors_are_a_condition_of_their_own() -> None:
    network = stirred(new_dit())
    x, t, known = inputs()
    unknown = torch.full_like(known, torch.nan)
    half = torch.cat((known[:, :2], unknown[:, 2:]), 1)  # a home and no work
    centre = cast(DiT, network).centre.repeat(3, 2)  # zero after scaling, and yet known
    outs = [network(x, t, anchors).clean for anchors in (known, half, centre, unknown)]
    assert all(bool(out.isfinite().all()) for out in outs)
    for i, one in enumerate(outs):
        assert all(float((one - other).abs().max()) > 1e-3 for other in outs[:i])


def test_one_unknown_anchor_does_not_touch_the_others_of_the_batch() -> None:
    network = stirred(new_dit())
    x, t, anchors = inputs()
    mixed = anchors.clone()
    mixed[1] = torch.nan
    torch.testing.assert_close(network(x, t, mixed).clean[[0, 2]], network(x, t, anchors).clean[[0, 2]])


def test_every_attribute_has_one_table_with_a_null_level() -> None:
    group = new_dit(groups=DEFAULT_GROUPS).group
    assert group is not None
    sizes = [cast(nn.Embedding, table).weight.shape for table in group.tables]
    assert sizes == [(len(levels) + 1, DENOISER.embedding) for _, levels in DEFAULT_GROUPS.attributes]
    for table in group.tables:
        assert not cast(nn.Embedding, table).weight[0].any()


def test_the_null_level_of_every_attribute_adds_exactly_nothing() -> None:
    network = stirred(new_dit(groups=DEFAULT_GROUPS))
    assert isinstance(network, DiT) and network.group is not None
    with torch.no_grad():
        for table in network.group.tables:
            cast(nn.Embedding, table).weight[0] = 0.0  # as it begins
    null = torch.zeros(3, 2, dtype=torch.int64)
    assert not any(part.any() for part in network.group(null))
    assert torch.equal(network(*inputs(), null).clean, network(*inputs()).clean)


def test_each_attribute_is_heard_by_itself() -> None:
    network = stirred(new_dit(groups=DEFAULT_GROUPS))
    levels = torch.tensor([[0, 0], [1, 0], [2, 0], [0, 1], [0, 2], [1, 1], [4, 2]])
    x, t, anchors = (part[:1].expand(len(levels), *part.shape[1:]) for part in inputs())
    out = network(x, t, anchors, levels).clean
    distances = torch.cdist(out.flatten(1), out.flatten(1)) + torch.eye(len(levels))
    assert float(distances.min()) > 1e-3


def test_a_model_given_groups_denoises_as_before_at_the_null_level(model: LatentDiffusion) -> None:
    stirred(model.network)
    grouped = model.with_groups(DEFAULT_GROUPS, seed=3)
    x = torch.randn(3, model.max_length, LATENT, generator=chance())
    t, null = torch.tensor([3, 500, 990]), torch.zeros(3, 2, dtype=torch.int64)
    assert torch.equal(grouped.network(x, t, ANCHORS, null).clean, model.network(x, t, ANCHORS).clean)


# ---- noise and the way back


def test_the_noise_schedule_is_the_cosine_of_a_thousand_steps() -> None:
    schedule = noise_schedule(DiffusionConfig())
    kept = schedule.alphas_cumprod  # what is left of the signal's power
    assert len(kept) == 1_000
    assert float(kept[0]) > 0.9999 and float(kept[-1]) < 1e-5
    assert bool((kept.diff() < 0).all())

    def cosine(t: Tensor) -> Tensor:  # Nichol and Dhariwal 2021, equation 17
        return torch.cos((t + 0.008) / 1.008 * torch.pi / 2).square()

    steps = torch.arange(1, 1_000, dtype=torch.float64) / 1_000  # all but the last, whose beta is capped
    torch.testing.assert_close(
        kept[:-1].double(), cosine(steps) / cosine(torch.zeros(1, dtype=torch.float64)), atol=1e-5, rtol=1e-2
    )


def test_noise_is_added_as_the_formula_says() -> None:
    schedule = noise_schedule(DiffusionConfig())
    clean, noise = torch.randn(2, 4, LENGTH, LATENT, generator=chance())
    t = torch.tensor([0, 250, 700, 999])
    kept = schedule.alphas_cumprod[t][:, None, None]
    expected = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    torch.testing.assert_close(schedule.add_noise(clean, noise, t), expected)
    torch.testing.assert_close(schedule.add_noise(clean, noise, t)[-1], noise[-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("solver", ["ddim", "dpm++"])
@pytest.mark.parametrize("steps", [1, 10, 50])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_who_knows_the_answer_is_led_to_it_from_any_noise(
    solver: Literal["ddim", "dpm++"], steps: int, scale: float
) -> None:
    clean, noise = torch.randn(2, 5, LENGTH, LATENT, generator=chance())
    found = rollout(lambda x, t: clean, scale * noise, DiffusionConfig(solver=solver, steps=steps))
    torch.testing.assert_close(found, clean, atol=1e-4, rtol=0)


@pytest.mark.parametrize("solver", ["ddim", "dpm++"])
def test_steps_that_do_not_divide_the_schedule_leave_no_noise_either(solver: Literal["ddim", "dpm++"]) -> None:
    clean, noise = torch.randn(2, 5, LENGTH, LATENT, generator=chance())
    for steps in (6, 7, 15, 37):
        found = rollout(lambda x, t: clean, noise, DiffusionConfig(solver=solver, steps=steps))
        assert float((found - clean).abs().max()) < 1e-4, f"{steps} steps"


def gaussian_denoiser(mean: float, deviation: float) -> Callable[[Tensor, Tensor], Tensor]:
    """E[x0 | x_t] of x0 ~ N(mean, deviation^2)."""
    kept = noise_schedule(DiffusionConfig()).alphas_cumprod.double()  # (1000,)
    power = deviation**2

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        a = kept[t][:, None]
        return (mean * (1 - a) + power * a.sqrt() * x) / (power * a + 1 - a)

    return denoise


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (2.0, 0.5), (-1.0, 0.8)])
@pytest.mark.parametrize(
    ("diffusion", "within"),
    [
        (DDIM, 0.05),
        (DPM, 0.05),
        (DiffusionConfig(solver="dpm++", steps=50), 0.01),
        (DiffusionConfig(solver="ddim", steps=1_000), 0.01),
    ],
    ids=["ddim-50", "dpm++-10", "dpm++-50", "ddim-1000"],
)
def test_samples_of_a_gaussian_have_its_mean_and_deviation(
    diffusion: DiffusionConfig, within: float, mean: float, deviation: float
) -> None:
    """With the exact denoiser what comes out is Gaussian again, and the more steps there are the more it is the same one."""
    noise = torch.randn(4_000, 1, generator=chance(), dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std()  # what is left is the solver's own error
    made = rollout(gaussian_denoiser(mean, deviation), noise, diffusion)
    assert float(made.mean()) == pytest.approx(mean, abs=0.01)
    assert float(made.std()) == pytest.approx(deviation, rel=within)


@pytest.mark.parametrize("solver", ["ddim", "dpm++"])
def test_the_gradient_flows_through_the_last_steps_only(solver: Literal["ddim", "dpm++"]) -> None:
    diffusion = DiffusionConfig(solver=solver, steps=5)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(3, 4, generator=chance(), dtype=torch.float64)
    calls: list[tuple[Tensor, Tensor]] = []

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        calls.append((x.detach(), t))
        return torch.tanh(weight * x + t[:, None] / 1_000)

    def gradient(steps: int) -> float:
        calls.clear()
        return float(torch.autograd.grad(rollout(denoise, noise, diffusion, steps).square().sum(), weight)[0])

    assert not rollout(denoise, noise, diffusion).requires_grad
    found = {steps: gradient(steps) for steps in (1, 2, 5)}
    assert len(calls) == 5
    last = torch.autograd.grad(denoise(*calls[-1]).square().sum(), weight)[0]
    assert found[1] == pytest.approx(float(last), rel=1e-6)
    assert abs(found[2] - found[1]) > 1e-6
    values = []
    for nudge in (-2e-3, 4e-3):
        with torch.no_grad():
            weight += nudge
        values.append(float(rollout(denoise, noise, diffusion).square().sum()))
    assert found[5] == pytest.approx((values[1] - values[0]) / 4e-3, rel=1e-3), "all steps: the whole derivative"


class Recorder(nn.Module):
    """A denoiser that keeps what it was told last and what it said."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.told: list[Tensor | None] = []
        self.said: list[Tensor] = []

    def forward(
        self, x: Tensor, t: Tensor, anchors: Tensor, levels: Tensor | None = None, estimate: Tensor | None = None
    ) -> Estimate:
        out: Estimate = self.network(x, t, anchors, levels, estimate)
        self.told.append(estimate)
        self.said.append(out.clean)
        return out


@pytest.mark.parametrize("forced", [False, True])
@torch.no_grad()
def test_the_network_is_told_its_last_estimate(model: LatentDiffusion, forced: bool) -> None:
    recorder = Recorder(stirred(model.network))
    model.network = cast(DiT, recorder)
    noise = torch.randn(3, model.max_length, LATENT, generator=chance())
    lengths = torch.tensor([2, 5, model.max_length]) if forced else None
    model.roll_out(noise, np.full(3, -1), ANCHORS.double().numpy(), lengths)
    assert len(recorder.said) == model.config.diffusion.steps
    assert recorder.told[0] is None
    ends = lengths if lengths is not None else torch.full((3,), model.max_length)
    past = torch.arange(model.max_length) > ends[:, None]  # (3, length)
    for said, told in zip(recorder.said, recorder.told[1:], strict=False):
        assert told is not None
        assert torch.equal(told[~past], said[~past])
        assert torch.equal(told[past], model.autoencoder.padding.expand(int(past.sum()), -1))  # known, not estimated


def test_an_estimate_changes_the_answer_only_where_it_is_asked_for() -> None:
    estimate = torch.randn(3, LENGTH, LATENT, generator=chance(9))
    changed = DENOISER.model_copy(update={"self_conditioning": False})
    aware, unaware = stirred(new_dit()), stirred(DiT(changed, LATENT, LENGTH, VOCABULARY))
    assert not torch.equal(aware(*inputs(), None, estimate).clean, aware(*inputs()).clean)
    assert torch.equal(aware(*inputs(), None, torch.zeros_like(estimate)).clean, aware(*inputs()).clean)
    assert torch.equal(unaware(*inputs(), None, estimate).clean, unaware(*inputs()).clean)


# ---- latents of a dataset


def test_latents_on_disk_are_those_in_memory_and_are_encoded_once(
    model: LatentDiffusion, dataset: TrajectoryDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoencoder, path = model.autoencoder, tmp_path / "latents.npy"
    set_statistics(autoencoder, dataset)
    memory = encode_split(autoencoder, dataset, "train", None)
    disk = encode_split(autoencoder, dataset, "train", path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["latents.npy"]
    before = path.stat()

    def never(*_: Any) -> Tensor:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Autoencoder, "encode", never)
    again = encode_split(autoencoder, dataset, "train", path)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    chosen = dataset.split("train")[::7]
    for other in (disk, again):
        assert isinstance(other.values, np.memmap)
        assert torch.equal(other.batch(chosen), memory.batch(chosen))


def test_a_batch_of_latents_is_what_the_autoencoder_makes_of_the_trajectories(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    autoencoder = model.autoencoder
    set_statistics(autoencoder, dataset)
    latents = encode_split(autoencoder, dataset, "train", None)
    chosen = dataset.split("train")[[5, 0, 17, 5]]
    expected = autoencoder.standardise(model.encode(dataset.gather(chosen).tokens))
    torch.testing.assert_close(latents.batch(chosen), expected, atol=3e-3, rtol=3e-3)  # half precision


def test_standardised_training_latents_have_mean_0_and_variance_1(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    set_statistics(model.autoencoder, dataset)
    values = encode_split(model.autoencoder, dataset, "train", None).values.astype(np.float64)
    assert np.abs(values.mean(0)).max() < 1e-3
    assert np.abs(values.std(0) - 1).max() < 1e-3


def test_the_latent_of_a_token_is_the_mean_over_training_trajectories(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    typical = set_statistics(model.autoencoder, dataset)
    encoded = encode_split(model.autoencoder, dataset, "train", None).values.astype(np.float64)
    members = [dataset.gather(np.array([index]), model.max_length).tokens[0] for index in dataset.split("train")]
    ended = np.concatenate([with_end(torch.from_numpy(tokens[None]).long(), model.max_length)[0] for tokens in members])
    tokens = ended[ended != PAD]
    for token in (EOS, HOME, int(np.bincount(tokens)[FIRST_POI:].argmax()) + FIRST_POI):
        np.testing.assert_allclose(typical[token], encoded[tokens == token].mean(0), atol=2e-3)
    torch.testing.assert_close(typical[PAD], model.autoencoder.padding)
    assert bool(typical.isfinite().all()), "also of tokens that no trajectory has"


def test_the_denoiser_learns_which_tokens_the_latents_stand_for(dataset: TrajectoryDataset, tmp_path: Path) -> None:
    """A new denoiser thinks all tokens equally likely: the cross-entropy's part of the loss is the log of their number."""
    found = {}
    for share in (0.25, 0.5, 1.0):
        options = OPTIONS["latent-diffusion"]["denoiser"] | {"cross_entropy": share, "self_conditioning": False}
        model = cast(LatentDiffusion, fresh("latent-diffusion", dataset, denoiser=options))
        model.network.prototypes.copy_(set_statistics(model.autoencoder, dataset))
        trainer = Trainer(tmp_path, seed=0, config={})
        stage = model.denoising(dataset, unlabelled(dataset, 0), "denoiser", trainer, fresh=True)
        torch.manual_seed(4)
        found[share] = stage.loss(model.network, 0, Share()).item()
    assert found[1.0] == pytest.approx(np.log(len(dataset.vocabulary)), rel=1e-5)
    assert found[1.0] - found[0.5] == pytest.approx((found[1.0] - found[0.25]) * 2 / 3, rel=1e-4)


@pytest.mark.parametrize("what", ["cut short", "of another shape", "a pickle"])
def test_a_latents_file_that_is_not_whole_is_made_again(
    model: LatentDiffusion, dataset: TrajectoryDataset, tmp_path: Path, what: str
) -> None:
    """A disk can lose the end of a file that was not synced; what can be computed again should not stop a run."""
    path = tmp_path / "latents.npy"
    whole = np.array(encode_split(model.autoencoder, dataset, "train", path).values)
    content = path.read_bytes()
    path.unlink()
    if what == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif what == "of another shape":
        np.save(path, np.zeros((3, LATENT), np.float16))
    else:
        path.write_bytes(b"\x80\x04cposix\nsystem\n.")
    again = encode_split(model.autoencoder, dataset, "train", path)
    assert np.array_equal(again.values, whole)


# ---- the whole, as configured


class Watcher:
    """In a trainer's place: keeps the stages that it is given, and trains nothing."""

    seed = 0

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def path(self, name: str) -> Path | None:
        return None

    def run(self, stage: Stage) -> dict[str, float]:
        self.stages.append(stage)
        return {"loss": 0.0, "reconstruction": 1.0}


def test_the_preset_paper_is_the_papers_table() -> None:
    config = build(LatentDiffusionConfig, PRESETS["paper"], "paper")
    bart, dit, diffusion = config.autoencoder, config.denoiser, config.diffusion
    # shared diffusion settings, and the evaluation protocol: DDIM of 50 steps
    assert (diffusion.train_steps, diffusion.solver, diffusion.steps) == (1_000, "ddim", 50)
    # BART: layers, model dimension, FFN dimension, heads, max sequence length
    assert (bart.encoder_layers, bart.decoder_layers, bart.width, bart.feedforward, bart.heads) == (4, 2, 256, 1_024, 4)
    assert config.length == 64
    # DiT: depth 8-12, hidden size 128-512, heads, input dimension, demo embedding dim
    assert (dit.depth, dit.width, dit.heads, bart.latent, dit.embedding) == (12, 512, 4, 256, 256)
    # pretraining: learning rate, batch size, warm-up
    for part in (bart, dit):
        assert (part.learning_rate, part.batch, part.warmup) == (1e-4, 512, 1_000)
    assert bart.weight_decay == 0.01
    # finetuning: learning rate 1e-5 to 1e-6; its batch is the denoiser's, within 256 to 1024
    assert config.teaching.learning_rate == 1e-5


def test_the_papers_optimisers_are_adamw_and_adam_with_gradients_clipped_at_1(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    watcher = Watcher()
    model.fit(dataset, cast(Trainer, watcher))
    draw: Draw = unlabelled(dataset, 0)
    watcher.run(model.with_groups(DEFAULT_GROUPS, 0).teaching(dataset, draw, "strong", cast(Trainer, watcher)))
    assert [(stage.name, stage.optimizer, stage.clip) for stage in watcher.stages] == [
        ("autoencoder", "adamw", 1.0),
        ("denoiser", "adam", 1.0),
        ("strong", "adam", 1.0),
    ]
    assert not any(parameter.requires_grad for parameter in model.autoencoder.parameters()), "it is frozen by then"


@pytest.mark.parametrize(
    ("number", "options"),
    [(0, {"noise": 0.0}), (0, {"noise": 0.3}), (1, {})],
    ids=["autoencoder", "autoencoder with noise", "denoiser"],
)
def test_the_losses_of_two_processes_have_the_loss_of_one_as_their_mean(
    dataset: TrajectoryDataset, number: int, options: dict[str, float]
) -> None:
    """Each draws what the whole batch needs and takes its rows of it."""
    model = fresh("latent-diffusion", dataset, autoencoder=OPTIONS["latent-diffusion"]["autoencoder"] | options)
    watcher = Watcher()
    model.fit(dataset, cast(Trainer, watcher))
    stage = watcher.stages[number]
    stirred(stage.network.train())

    def loss(step: int, share: Share) -> float:
        torch.manual_seed(step)
        return float(stage.loss(stage.network, step, share))

    for step in range(4):  # with and without a first estimate
        halves = [loss(step, Share(rank, 2)) for rank in range(2)]
        assert np.mean(halves) == pytest.approx(loss(step, Share()), rel=1e-5)
        assert halves[0] != pytest.approx(halves[1], rel=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_validates(name: str) -> None:
    config = build(LatentDiffusionConfig, PRESETS[name], name)
    assert build(LatentDiffusionConfig, config.model_dump(mode="json"), name) == config


def test_the_preset_small_is_the_default() -> None:
    assert build(LatentDiffusionConfig, PRESETS["small"], "small") == LatentDiffusionConfig()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"autoencoder": {"width": 30}}, "'autoencoder' is wrong: width 30 is not a multiple of heads 4"),
        ({"denoiser": {"width": 36}}, "'denoiser' is wrong: width 36 is not a multiple of twice the heads 4"),
        ({"denoiser": {"width": 132, "heads": 4}}, "width 132 is not a multiple of twice the heads 4"),
        ({"diffusion": {"steps": 20, "train_steps": 10}}, "diffusion.steps is larger than diffusion.train_steps"),
        ({"denoiser": {"depht": 2}}, "unknown key 'depht' in 'denoiser'; did you mean 'depth'?"),
        ({"autoencoder": {"learning_rate": 0}}, "'autoencoder.learning_rate' is wrong"),
        ({"length": 1}, "'length' is wrong"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MobatlasError) as refused:
        build(LatentDiffusionConfig, values, "train")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("train: ") and "\n" not in str(refused.value)


def test_truncated_trajectories_are_counted(dataset: TrajectoryDataset) -> None:
    model = fresh("latent-diffusion", dataset, length=5)
    report = model.fit(dataset, cast(Trainer, Watcher()))
    lengths = [len(dataset.trajectory(int(index))) for index in dataset.split("train")]
    assert report["truncated"] == sum(length > 5 for length in lengths) > 0


def test_an_autoencoder_that_reconstructs_too_little_warns_loudly(
    dataset: TrajectoryDataset, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"steps": 1, "batch": 8}
    small = {"encoder_layers": 1, "width": 32, "feedforward": 64, "latent": LATENT} | one
    model = fresh("latent-diffusion", dataset, autoencoder=small, denoiser={"depth": 1, "width": 32, "heads": 2, **one})
    with caplog.at_level(logging.WARNING, "mobatlas"):
        report = model.fit(dataset, Trainer(None, quiet=True, accelerator="cpu"))
    assert report["autoencoder"]["reconstruction"] < 0.95
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    share = 100 * report["autoencoder"]["reconstruction"]
    assert f"WARNING: the autoencoder reconstructs {share:.1f} % of held-out tokens" in warned[0]
    assert "autoencoder.steps" in warned[0]


def test_an_autoencoder_that_reconstructs_enough_is_silent(
    model: LatentDiffusion, dataset: TrajectoryDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mobatlas"):
        model.fit(dataset, cast(Trainer, Watcher()))
    assert not caplog.records
