"""The variational autoencoder: its bound, its KL with weights and free bits, its latent."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from mobatlas.config import build
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import FIRST_POI, HOME, PAD
from mobatlas.generators.network_generator import SequenceGenerator
from mobatlas.generators.transformer import with_end
from mobatlas.generators.vae import PRESETS, VaeConfig, VariationalAutoencoder
from mobatlas.groups import DEFAULT_GROUPS
from tests.networks import chance, stirred
from tests.tiny import OPTIONS, fitted, small_city

NAME = "vae"
SIZE = FIRST_POI + 5
BATCH = 6


def network(**latent: Any) -> VariationalAutoencoder:
    config = build(VaeConfig, OPTIONS[NAME] | {"latent": OPTIONS[NAME]["latent"] | latent}, NAME)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = VariationalAutoencoder(config, SIZE, DEFAULT_GROUPS)
    return cast(VariationalAutoencoder, stirred(made).eval())


def batch(net: VariationalAutoencoder, n: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens with their ends, anchors, levels and noise."""
    tokens = torch.randint(HOME, SIZE, (n, 8), generator=chance())
    tokens[0, 3:] = PAD
    tokens[1, 1:] = PAD
    levels = torch.from_numpy(DEFAULT_GROUPS.level_codes[np.arange(n) % len(DEFAULT_GROUPS)] + 1)
    return (
        with_end(tokens, 12),
        torch.rand(n, 4, generator=chance(1)),
        levels,
        torch.randn(n, net.latent, generator=chance(2)),
    )


def by_number(net: VariationalAutoencoder, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The KL of each number of the latent, (batch, latent), as torch has it."""
    mean, log_deviation = net.encode(inputs[0], net.decoder.person(inputs[1], inputs[2])).chunk(
        2, -1
    )
    return kl_divergence(Normal(mean, log_deviation.exp()), Normal(0.0, 1.0))


def test_the_terms_are_reconstruction_and_kl() -> None:
    net = network()
    inputs = batch(net)
    terms = net.terms(*inputs)
    assert list(terms) == ["reconstruction", "kl"]
    torch.testing.assert_close(terms["kl"], by_number(net, inputs).sum(1))
    mean, log_deviation = net.encode(inputs[0], net.decoder.person(inputs[1], inputs[2])).chunk(
        2, -1
    )
    latent = mean + log_deviation.exp() * inputs[3]
    expected = net.decoder.nats(inputs[0], net.condition(inputs[1], inputs[2], latent))
    torch.testing.assert_close(terms["reconstruction"], expected)


def test_the_encoding_does_not_depend_on_padding() -> None:
    net = network()
    tokens, anchors, levels, _ = batch(net)
    person = net.decoder.person(anchors, levels)
    longer = torch.nn.functional.pad(tokens, (0, 3), value=PAD)
    torch.testing.assert_close(net.encode(tokens, person), net.encode(longer, person))


def test_the_terms_bound_the_likelihood() -> None:
    """Compare the bound, averaged over the encoder, with the likelihood over the prior."""
    net = network()
    n = 20_000
    tokens, anchors, levels, _ = (part[:1].expand(n, -1) for part in batch(net))
    noise = torch.randn(n, net.latent, generator=chance(5))
    nats = net.decoder.nats(tokens, net.condition(anchors, levels, noise)).double()
    likelihood = float(torch.logsumexp(-nats, 0) - math.log(n))
    terms = net.terms(tokens, anchors, levels, noise)
    assert -float(terms["reconstruction"].mean() + terms["kl"].mean()) < likelihood


def test_the_loss_of_free_bits_is_constant() -> None:
    inputs = batch(network())
    bits = by_number(network(), inputs).mean(0) / math.log(2)  # (latent,)
    middle = float(bits.sort().values[:3].mean())
    net = network(free_bits=middle)
    free = bits < middle
    assert bool(free.any()) and not bool(free.all())
    charged = float((net(*inputs) - net.terms(*inputs)["reconstruction"]).mean())
    assert charged == pytest.approx(math.log(2) * float(bits.clamp(min=middle).sum()), rel=1e-4)
    # a little more or less of what is free changes nothing
    net.to_latent.requires_grad_(True)
    cost = (net(*inputs) - net.terms(*inputs)["reconstruction"]).mean()
    slopes = (
        torch.autograd.grad(cost, net.to_latent.weight)[0].view(2, net.latent, -1).abs().sum((0, 2))
    )
    assert torch.equal(
        slopes > 1e-3, ~free
    )  # what is left of the reconstruction, taken off, is rounding


def test_the_weight_of_the_kl_rises_from_zero_and_is_1_in_phase_2() -> None:
    net = network(warmup=10, free_bits=0.0)
    inputs = batch(net)
    terms = net.terms(*inputs)
    for step, weight in ((0, 0.1), (4, 0.5), (9, 1.0), (10**6, 1.0), (None, 1.0)):
        torch.testing.assert_close(
            net(*inputs, step), terms["reconstruction"] + weight * terms["kl"]
        )
    torch.testing.assert_close(
        network(warmup=0, free_bits=0.0)(*inputs, 0), terms["reconstruction"] + terms["kl"]
    )


def test_samples_depend_on_the_latent() -> None:
    net = network()
    n = 64
    _, anchors, levels, _ = (part[:1].expand(n, -1) for part in batch(net))
    numbers = torch.rand(n, 12, generator=chance(7))
    one, same, other = (
        net.decoder.sample(
            net.condition(anchors, levels, torch.randn(n, net.latent, generator=chance(seed))),
            lambda *_: numbers,
            12,
        )
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_held_out_trajectories_have_a_bound_and_its_terms(tmp_path: Any) -> None:
    """After so little training the latent tells what is free at least."""
    dataset: TrajectoryDataset = small_city(tmp_path)
    model = fitted(NAME, dataset, latent=OPTIONS[NAME]["latent"] | {"free_bits": 0.5})
    assert isinstance(model, SequenceGenerator)
    found = model.held_out(dataset)
    assert found["nats"] == pytest.approx(found["reconstruction"] + found["kl"])
    assert found["nats"] < 0.75 * math.log(len(dataset.vocabulary))
    places = float(np.minimum(dataset.lengths[dataset.split("val")] + 1, model.max_length).mean())
    assert found["kl"] * places > 0.5 * math.log(2)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_validates(name: str) -> None:
    config = build(VaeConfig, PRESETS[name], name)
    assert build(VaeConfig, config.model_dump(mode="json"), name) == config
    assert (config == VaeConfig()) == (name == "small")
