"""The distance bias: logits of places by their distance to home and work."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mobatlas.data.types import FIRST_POI, HOME, SPECIALS, VOCABULARY_SCHEMA, Vocabulary
from mobatlas.generators.latent_diffusion.dit import DenoiserConfig, DiT
from mobatlas.generators.layers import KNOTS, DistanceBias
from mobatlas.generators.transformer import (
    CausalTransformer,
    TransformerConfig,
    previous_tokens,
    with_end,
)
from tests.networks import chance, stirred

PLACES = 24
KM = 1 / 111.195  # degrees of latitude


def line(places: int = PLACES) -> Vocabulary:
    """Places one kilometre apart, on a line north of the equator."""
    n = len(SPECIALS)
    columns = {
        "token": range(n + places),
        "poi_id": [*SPECIALS, *(f"p{number}" for number in range(places))],
        "lat": [*[None] * n, *(KM * number for number in range(places))],
        "lon": [*[None] * n, *[0.0] * places],
        "category": [None] * (n + places),
        "visits": [1] * (n + places),
    }
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    return Vocabulary(table.cast(VOCABULARY_SCHEMA))


def network(curves: int, seed: int = 0) -> CausalTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = TransformerConfig(depth=1, width=16, heads=2, embedding=8, distance_curves=curves)
        transformer = CausalTransformer(config, FIRST_POI + PLACES, length=4)
    if transformer.distance_bias is not None:
        transformer.distance_bias.measure(line())
    return transformer


def homes(n: int, seed: int = 0) -> Tensor:
    """Anchors (n, 4) with a home anywhere on the line and no work."""
    north = KM * (PLACES - 1) * torch.rand(n, generator=chance(seed))
    return torch.stack((north, torch.zeros(n), *[torch.full((n,), torch.nan)] * 2), 1)


def test_distances_are_between_knots_of_doubling_width() -> None:
    near = DistanceBias(8, FIRST_POI + PLACES, 1)
    near.measure(line())
    first_place = torch.zeros(1, 2)
    weights = near._knot_weights(first_place)[0]  # (knots, vocabulary)
    assert weights[:, :FIRST_POI].abs().max() == 0  # special tokens have no coordinates
    assert weights[:, FIRST_POI:].sum(0) == pytest.approx(np.ones(PLACES))
    knot = torch.arange(KNOTS, dtype=torch.float32) @ weights[:, FIRST_POI:]
    assert knot == pytest.approx(np.log2(1 + 2 * np.arange(PLACES)), abs=2e-3)


def test_a_degree_of_longitude_is_shorter_away_from_the_equator() -> None:
    near = DistanceBias(8, 1, 1)
    near.coordinates.copy_(torch.tensor([[60.0, 0.0]]))
    near.has_coordinates.fill_(1)
    east, north = (
        near._knot_weights(torch.tensor([anchor]))[0] for anchor in ([60.0, 0.02], [60.01, 0.0])
    )
    torch.testing.assert_close(east, north, atol=1e-3, rtol=0)


def test_cached_distances_have_the_precision_of_the_product() -> None:
    near = DistanceBias(8, FIRST_POI + PLACES, 2)
    near.measure(line())
    stirred(near)
    anchors = homes(5)
    condition = torch.randn(5, 8, generator=chance(1))
    with torch.autocast("cpu", torch.bfloat16):
        coarse = near(anchors, condition)
    fine = near(anchors, condition)
    torch.testing.assert_close(coarse, fine, atol=0.1, rtol=0.1)
    assert not torch.equal(coarse, fine)
    assert near._cache is not None and near._cache[1][0].dtype == torch.float32
    assert near._distances(anchors) is near._distances(anchors), "they are cached"


def test_unknown_anchors_have_no_distance_bias() -> None:
    near = DistanceBias(8, FIRST_POI + PLACES, 2)
    near.measure(line())
    stirred(near)
    assert near(torch.full((1, 4), torch.nan), torch.ones(1, 8)).abs().max() == 0


def test_cached_distances_are_not_used_for_other_anchors() -> None:
    near = stirred(DistanceBias(8, FIRST_POI + PLACES, 2))
    cast(DistanceBias, near).measure(line())
    first = homes(3)
    second = homes(3, 1)
    condition = torch.ones(3, 8)
    alone = near(second, condition)
    assert torch.equal(near(first, condition), near(first.clone(), condition))
    assert torch.equal(near(second, condition), alone)
    assert not torch.equal(near(first, condition), alone)


def test_the_distance_bias_of_an_untrained_transformer_is_zero() -> None:
    tokens = previous_tokens(torch.full((3, 4), HOME))
    mapped = network(2)
    plain = network(0)
    plain.load_state_dict(
        {name: value for name, value in mapped.state_dict().items() if "distance_bias" not in name}
    )
    people = homes(3)
    ours, theirs = (each.logits(tokens, each.person(people, None)) for each in (mapped, plain))
    torch.testing.assert_close(ours, theirs)


def test_logits_place_by_place_with_a_cache_equal_logits_of_all_places() -> None:
    net = cast(CausalTransformer, stirred(network(3)).eval())
    condition = net.person(homes(5), None)
    tokens = torch.randint(HOME, FIRST_POI + PLACES, (5, 4), generator=chance(1))
    tokens = previous_tokens(tokens)
    cache = net.new_cache(5)
    one_by_one = [net.logits(tokens[:, place, None], condition, cache, place) for place in range(4)]
    torch.testing.assert_close(
        torch.cat(one_by_one, 1), net.logits(tokens, condition), atol=1e-4, rtol=1e-4
    )


def held_out_nats(curves: int) -> float:
    """Return held-out nats after training on people who visit the place nearest to home."""
    net = network(curves)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def nats(people: Tensor) -> Tensor:
        nearest = FIRST_POI + (people[:, 0] / KM).round().long()
        tokens = F.pad(nearest[:, None], (1, 1), value=HOME)
        return net(with_end(tokens, 4), people, None, torch.empty(0)).mean()

    for step in range(150):
        optimizer.zero_grad()
        loss: Any = nats(homes(64, step))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(nats(homes(500, 10_000)))


def test_with_a_distance_bias_a_transformer_learns_nearby_places_sooner() -> None:
    assert held_out_nats(2) < 0.6 * held_out_nats(0)


def denoiser(curves: int) -> DiT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = DenoiserConfig(depth=1, width=16, heads=2, embedding=8, distance_curves=curves)
        dit = DiT(config, 4, 3, FIRST_POI + PLACES)
    if dit.distance_bias is not None:
        dit.distance_bias.measure(line())
    return dit


def test_the_distance_bias_of_an_untrained_denoiser_is_zero() -> None:
    mapped = denoiser(2)
    plain = denoiser(0)
    plain.load_state_dict(
        {name: value for name, value in mapped.state_dict().items() if "distance_bias" not in name}
    )
    noisy = torch.randn(3, 3, 4, generator=chance())
    t = torch.tensor([5, 500, 995])
    torch.testing.assert_close(mapped(noisy, t, homes(3)), plain(noisy, t, homes(3)))


def guessed_nats(curves: int) -> float:
    """Return held-out nats of the place nearest to home, predicted from noise alone."""
    net = denoiser(curves)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def nats(people: Tensor, seed: int) -> Tensor:
        noise = torch.randn(len(people), 3, 4, generator=chance(seed))
        t = torch.full((len(people),), 999)
        words = net(noise, t, people).words[:, 1]
        return F.cross_entropy(words, FIRST_POI + (people[:, 0] / KM).round().long())

    for step in range(150):
        optimizer.zero_grad()
        loss: Any = nats(homes(64, step), step)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(nats(homes(512, 1_000), 1_000))


def test_with_a_distance_bias_a_denoiser_predicts_places_near_new_homes() -> None:
    assert guessed_nats(3) < guessed_nats(0) - 0.3


def test_a_distance_bias_without_cross_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="cross_entropy"):
        DenoiserConfig(distance_curves=2, cross_entropy=0.0)
