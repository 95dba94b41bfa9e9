"""The denoiser of latent diffusion, the noise schedule and the solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.generators.latent_diffusion.dit import Block, DenoiserConfig, DiT, Estimate
from mobatlas.generators.latent_diffusion.generator import (
    DiffusionConfig,
    LatentDiffusion,
    noise_schedule,
    rollout,
)
from mobatlas.groups import DEFAULT_GROUPS
from tests.networks import LATENT, LENGTH, VOCABULARY, chance, new_model, stirred
from tests.tiny import small_city

DDIM = DiffusionConfig(solver="ddim", steps=50)
DPM = DiffusionConfig(solver="dpm++", steps=10)
DENOISER = DenoiserConfig(depth=2, width=32, heads=2, embedding=8)
ANCHORS = torch.tensor(
    [[40.1, -74.0, 40.3, -73.8], [40.2, -74.1, 40.0, -74.2], [40.0, -73.9, 40.2, -74.0]]
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


@pytest.fixture
def model(dataset: TrajectoryDataset) -> LatentDiffusion:
    return new_model(dataset)


def new_dit(**changes: Any) -> DiT:
    torch.manual_seed(1)
    made = DiT(DENOISER, LATENT, LENGTH, VOCABULARY, **changes).eval()
    made.prototypes.copy_(torch.randn(VOCABULARY, LATENT, generator=chance(5)))
    made.conditioning.centre_on(ANCHORS.double().numpy())
    return made


def inputs(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(rows, LENGTH, LATENT, generator=chance()),
        torch.tensor([3, 500, 990])[:rows],
        ANCHORS[:rows],
    )


def test_a_new_block_is_the_identity() -> None:
    x = torch.randn(3, LENGTH, 32)
    condition = torch.randn(3, 32)
    assert torch.equal(Block(DENOISER)(x, condition), x)
    assert not torch.equal(stirred(Block(DENOISER))(x, condition), x)


def test_a_new_denoiser_predicts_the_mean_of_all_tokens() -> None:
    network = new_dit()
    torch.testing.assert_close(
        network(*inputs()).clean, network.prototypes.mean(0).expand(3, LENGTH, LATENT)
    )


def test_without_cross_entropy_a_new_denoiser_predicts_zero() -> None:
    plain = DiT(DENOISER.model_copy(update={"cross_entropy": 0.0}), LATENT, LENGTH, VOCABULARY)(
        *inputs()
    )
    assert torch.equal(plain.clean, torch.zeros(3, LENGTH, LATENT)) and plain.words is None


def test_a_denoiser_certain_of_a_token_predicts_its_latent() -> None:
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
    centre = cast(DiT, network).conditioning.centre.repeat(
        3, 2
    )  # zero after scaling, and yet known
    outs = [network(x, t, anchors).clean for anchors in (known, half, centre, unknown)]
    assert all(bool(out.isfinite().all()) for out in outs)
    for i, one in enumerate(outs):
        assert all(float((one - other).abs().max()) > 1e-3 for other in outs[:i])


def test_an_unknown_anchor_does_not_change_other_rows_of_the_batch() -> None:
    network = stirred(new_dit())
    x, t, anchors = inputs()
    mixed = anchors.clone()
    mixed[1] = torch.nan
    torch.testing.assert_close(
        network(x, t, mixed).clean[[0, 2]], network(x, t, anchors).clean[[0, 2]]
    )


def test_every_attribute_has_one_table_with_a_null_level() -> None:
    group = new_dit(groups=DEFAULT_GROUPS).conditioning.groups
    assert group is not None
    sizes = [cast(nn.Embedding, table).weight.shape for table in group.tables]
    assert sizes == [
        (len(levels) + 1, DENOISER.embedding) for _, levels in DEFAULT_GROUPS.attributes
    ]
    for table in group.tables:
        assert not cast(nn.Embedding, table).weight[0].any()


def test_the_null_level_of_every_attribute_adds_zero() -> None:
    network = stirred(new_dit(groups=DEFAULT_GROUPS))
    assert isinstance(network, DiT) and network.conditioning.groups is not None
    with torch.no_grad():
        for table in network.conditioning.groups.tables:
            cast(nn.Embedding, table).weight[0] = 0.0  # as it begins
    null = torch.zeros(3, 2, dtype=torch.int64)
    assert not any(part.any() for part in network.conditioning.groups(null))
    assert torch.equal(network(*inputs(), null).clean, network(*inputs()).clean)


def test_each_level_of_each_attribute_changes_the_estimate() -> None:
    network = stirred(new_dit(groups=DEFAULT_GROUPS))
    levels = torch.tensor([[0, 0], [1, 0], [2, 0], [0, 1], [0, 2], [1, 1], [4, 2]])
    x, t, anchors = (part[:1].expand(len(levels), *part.shape[1:]) for part in inputs())
    out = network(x, t, anchors, levels).clean
    distances = torch.cdist(out.flatten(1), out.flatten(1)) + torch.eye(len(levels))
    assert float(distances.min()) > 1e-3


def test_a_model_with_groups_denoises_unknown_groups_as_before(model: LatentDiffusion) -> None:
    stirred(model.network)
    grouped = model.with_groups(DEFAULT_GROUPS, seed=3)
    x = torch.randn(3, model.max_length, LATENT, generator=chance())
    t = torch.tensor([3, 500, 990])
    null = torch.zeros(3, 2, dtype=torch.int64)
    assert torch.equal(
        grouped.network(x, t, ANCHORS, null).clean, model.network(x, t, ANCHORS).clean
    )


def test_the_noise_schedule_is_the_cosine_of_a_thousand_steps() -> None:
    schedule = noise_schedule(DiffusionConfig())
    kept = schedule.alphas_cumprod  # what is left of the signal's power
    assert len(kept) == 1_000
    assert float(kept[0]) > 0.9999 and float(kept[-1]) < 1e-5
    assert bool((kept.diff() < 0).all())

    def cosine(t: Tensor) -> Tensor:  # Nichol and Dhariwal 2021, equation 17
        return torch.cos((t + 0.008) / 1.008 * torch.pi / 2).square()

    steps = (
        torch.arange(1, 1_000, dtype=torch.float64) / 1_000
    )  # all but the last, whose beta is capped
    torch.testing.assert_close(
        kept[:-1].double(),
        cosine(steps) / cosine(torch.zeros(1, dtype=torch.float64)),
        atol=1e-5,
        rtol=1e-2,
    )


def test_noise_is_added_as_the_formula_says() -> None:
    schedule = noise_schedule(DiffusionConfig())
    clean, noise = torch.randn(2, 4, LENGTH, LATENT, generator=chance())
    t = torch.tensor([0, 250, 700, 999])
    kept = schedule.alphas_cumprod[t][:, None, None]
    expected = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    torch.testing.assert_close(schedule.add_noise(clean, noise, t), expected)
    torch.testing.assert_close(
        schedule.add_noise(clean, noise, t)[-1], noise[-1], atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("solver", ["ddim", "dpm++"])
@pytest.mark.parametrize("steps", [1, 10, 50])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_an_exact_denoiser_reaches_the_clean_latents_from_any_noise(
    solver: Literal["ddim", "dpm++"], steps: int, scale: float
) -> None:
    clean, noise = torch.randn(2, 5, LENGTH, LATENT, generator=chance())
    found = rollout(lambda x, t: clean, scale * noise, DiffusionConfig(solver=solver, steps=steps))
    torch.testing.assert_close(found, clean, atol=1e-4, rtol=0)


@pytest.mark.parametrize("solver", ["ddim", "dpm++"])
def test_steps_that_do_not_divide_the_schedule_leave_no_noise(
    solver: Literal["ddim", "dpm++"],
) -> None:
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
    """With the exact denoiser samples are Gaussian, and closer to the target with more steps."""
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
        return float(
            torch.autograd.grad(rollout(denoise, noise, diffusion, steps).square().sum(), weight)[0]
        )

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
    assert found[5] == pytest.approx((values[1] - values[0]) / 4e-3, rel=1e-3), (
        "all steps: the whole derivative"
    )


class Recorder(nn.Module):
    """A denoiser that records the estimates it is given and those it returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor] = []

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        anchors: Tensor,
        levels: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Estimate:
        out: Estimate = self.network(x, t, anchors, levels, estimate)
        self.inputs.append(estimate)
        self.outputs.append(out.clean)
        return out


@torch.no_grad()
def test_each_step_reads_the_estimate_of_the_step_before(model: LatentDiffusion) -> None:
    recorder = Recorder(stirred(model.network))
    model.network = cast(DiT, recorder)
    noise = torch.randn(3, model.max_length, LATENT, generator=chance())
    model.roll_out(noise, np.full(3, -1), ANCHORS.double().numpy())
    assert len(recorder.outputs) == model.config.diffusion.steps
    assert recorder.inputs[0] is None
    for output, estimate in zip(recorder.outputs[:-1], recorder.inputs[1:], strict=True):
        assert estimate is not None
        assert torch.equal(estimate, output)


def test_the_last_estimate_is_read_only_with_self_conditioning() -> None:
    estimate = torch.randn(3, LENGTH, LATENT, generator=chance(9))
    changed = DENOISER.model_copy(update={"self_conditioning": False})
    aware = stirred(new_dit())
    unaware = stirred(DiT(changed, LATENT, LENGTH, VOCABULARY))
    assert not torch.equal(aware(*inputs(), None, estimate).clean, aware(*inputs()).clean)
    assert torch.equal(
        aware(*inputs(), None, torch.zeros_like(estimate)).clean, aware(*inputs()).clean
    )
    assert torch.equal(unaware(*inputs(), None, estimate).clean, unaware(*inputs()).clean)
