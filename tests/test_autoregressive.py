"""The autoregressive generator: cache, likelihood, gradient and losses, computed twice."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mobatlas.config import build
from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset
from mobatlas.data.types import BOS, EOS, FIRST_POI, HOME, MASK, PAD
from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import normalise, tv
from mobatlas.features.maps import build_feature
from mobatlas.generators.autoregressive import PRESETS, AutoregressiveConfig
from mobatlas.generators.network_generator import SequenceGenerator
from mobatlas.generators.protocol import UNKNOWN, Examples
from mobatlas.generators.transformer import (
    CausalTransformer,
    TransformerConfig,
    draw_tokens,
    in_length_buckets,
    previous_tokens,
    with_end,
)
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.pipeline.models import train
from mobatlas.supervision.strategies import labelled_draw
from mobatlas.training.loop import Execution, Share, Trainer
from tests.networks import chance, stirred
from tests.tiny import OPTIONS, fitted, fresh, small_city
from tests.trainers import make_trainer

NAME = "autoregressive"
QUIET = Execution(quiet=True)
TINY = build(TransformerConfig, OPTIONS[NAME]["network"], "tiny")
SIZE = FIRST_POI + 2  # five tokens that trajectories may hold
LENGTH = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


@pytest.fixture(scope="module")
def model(dataset: TrajectoryDataset) -> SequenceGenerator:
    made = fitted(NAME, dataset)
    assert isinstance(made, SequenceGenerator)
    return made


@pytest.fixture(scope="module")
def grouped(model: SequenceGenerator) -> SequenceGenerator:
    return model.with_groups(DEFAULT_GROUPS, seed=1)


def network(length: int = LENGTH) -> CausalTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = CausalTransformer(TINY, SIZE, length)
    return cast(CausalTransformer, stirred(made).eval())


def every_trajectory() -> Tensor:
    """All trajectories of one to three tokens, with their ends, (155, 3)."""
    words = range(HOME, SIZE)
    rows = [row for n in range(1, LENGTH + 1) for row in itertools.product(words, repeat=n)]
    padded = torch.tensor([[*row, *[PAD] * (LENGTH - len(row))] for row in rows])
    return with_end(padded, LENGTH)


def anchors(dataset: TrajectoryDataset, n: int) -> np.ndarray:
    return dataset.anchors[dataset.person[dataset.split("train")[:n]]]


# ---- the network


def test_logits_place_by_place_with_a_cache_equal_logits_of_all_places() -> None:
    length = 9
    batch = 5
    net = network(length)
    condition = torch.randn(batch, TINY.width, generator=chance())
    tokens = previous_tokens(torch.randint(HOME, SIZE, (batch, length), generator=chance(1)))
    cache = net.new_cache(batch)
    one_by_one = [
        net.logits(tokens[:, place, None], condition, cache, place) for place in range(length)
    ]
    torch.testing.assert_close(
        torch.cat(one_by_one, 1), net.logits(tokens, condition), atol=1e-4, rtol=1e-4
    )


def test_logits_do_not_depend_on_later_tokens() -> None:
    net = network(6)
    condition = torch.zeros(1, TINY.width)
    tokens = torch.full((1, 6), HOME)
    later = torch.tensor([[HOME, HOME, HOME, FIRST_POI, FIRST_POI, FIRST_POI]])
    one = net.logits(tokens, condition)
    other = net.logits(later, condition)
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3:], other[:, 3:])


def test_length_buckets_do_not_change_the_likelihood() -> None:
    net = network()
    tokens = every_trajectory()[torch.randperm(155, generator=chance(2))]
    condition = torch.randn(len(tokens), TINY.width, generator=chance())
    torch.testing.assert_close(
        in_length_buckets(net.nats, tokens, condition), net.nats(tokens, condition)
    )
    torch.testing.assert_close(
        in_length_buckets(net.nats, tokens[:2], condition[:2]), net.nats(tokens[:2], condition[:2])
    )


def test_probabilities_of_all_trajectories_sum_to_1() -> None:
    net = network()
    tokens = every_trajectory()
    for number in range(3):
        condition = torch.randn(1, TINY.width, generator=chance(number)).expand(len(tokens), -1)
        assert float(torch.exp(-net.nats(tokens, condition)).sum()) == pytest.approx(1, abs=1e-5)


def test_samples_have_the_frequencies_of_their_probabilities() -> None:
    net = network()
    tokens = every_trajectory()
    n = 20_000
    condition = torch.randn(1, TINY.width, generator=chance(3))
    likely = torch.exp(-net.nats(tokens, condition.expand(len(tokens), -1))).numpy()
    numbers = torch.rand(n, LENGTH, generator=chance(4))
    made = with_end(net.sample(condition.expand(n, -1), lambda *_: numbers, LENGTH), LENGTH)
    found = {tuple(row): 0 for row in tokens.tolist()}
    for row in made.tolist():
        found[tuple(row)] += 1
    counts = np.array(list(found.values()))
    error = np.sqrt(n * likely * (1 - likely))
    assert (np.abs(counts - n * likely) < 5 * error + 1).all()


def test_sampling_stops_when_all_trajectories_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(9)
    places = []
    logits = CausalTransformer.logits
    ends = torch.tensor([2, 4, 1])

    def counted(
        self: CausalTransformer, last: Tensor, condition: Tensor, cache: Tensor, place: int
    ) -> Tensor:
        places.append(place)
        scores = logits(self, last, condition, cache, place)
        scores[:, 0, EOS] = torch.where(ends <= place, 1e4, -torch.inf)
        return scores

    monkeypatch.setattr(CausalTransformer, "logits", counted)
    numbers = torch.rand(3, 9, generator=chance())
    condition = torch.zeros(3, TINY.width)
    made = net.sample(condition, lambda *_: numbers, 9)
    assert (made != PAD).sum(1).tolist() == ends.tolist()
    assert places == [0, 1, 2, 3, 4]


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.randoms(),
)
def test_a_token_is_drawn_by_inversion_of_the_cumulated_probability(
    logits: list[float], number: float, random: Any
) -> None:
    scores = torch.tensor([logits])
    barred = random.sample(range(len(logits)), random.randrange(len(logits)))
    scores[0, barred] = -torch.inf
    token = int(draw_tokens(scores, torch.tensor([number], dtype=torch.float64)))
    total = np.cumsum(scores[0].softmax(0).double().numpy())
    assert token not in barred
    assert (total[token - 1] if token else 0) <= number * total[-1] < total[token]


def test_end_tokens_follow_trajectories_that_leave_room() -> None:
    tokens = torch.tensor([[7, 8, PAD], [7, 8, 9], [7, PAD, PAD]])
    assert with_end(tokens, 4).tolist() == [[7, 8, EOS, PAD], [7, 8, 9, EOS], [7, EOS, PAD, PAD]]
    assert with_end(tokens, 3).tolist() == [[7, 8, EOS], [7, 8, 9], [7, EOS, PAD]]
    assert with_end(tokens, 2).tolist() == [[7, 8], [7, 8], [7, EOS]]
    assert previous_tokens(tokens).tolist() == [[BOS, 7, 8], [BOS, 7, 8], [BOS, 7, PAD]]


# ---- the likelihood of a model


def test_the_likelihood_is_the_product_of_token_probabilities(
    grouped: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    """A trajectory of a dataset, one that fills all places, and one that is too long."""
    lengths = [4, grouped.max_length, grouped.max_length + 3]
    groups = np.array([2, UNKNOWN, 5])
    rows = [
        np.resize(dataset.trajectory(int(index)), n)
        for index, n in zip(dataset.split("val"), lengths, strict=False)
    ]
    given_to = Trajectories(
        np.concatenate(rows), np.concatenate(([0], np.cumsum(lengths))), anchors(dataset, 3)
    )
    found = grouped.log_likelihood(given_to, groups)
    for number, row in enumerate(rows):
        written = [*row[: grouped.max_length].tolist(), EOS][: grouped.max_length]
        total = 0.0
        last = BOS
        cache = grouped.network.new_cache(1)
        levels = (
            DEFAULT_GROUPS.level_codes[groups[number]] + 1
            if groups[number] != UNKNOWN
            else np.zeros(2, np.int64)
        )
        home = torch.from_numpy(given_to.anchors[number : number + 1]).float()
        with torch.no_grad():
            condition = grouped.network.person(home, torch.from_numpy(levels[None]))
            for place, token in enumerate(written):
                scores = grouped.network.logits(torch.tensor([[last]]), condition, cache, place)
                total = total + float(scores.log_softmax(-1)[0, 0, token])
                last = token
        assert found[number] == pytest.approx(total, abs=1e-3)


def test_training_makes_held_out_trajectories_likelier(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    untrained = fresh(NAME, dataset)
    assert isinstance(untrained, SequenceGenerator)
    before_training = untrained.held_out(dataset)
    after = model.held_out(dataset)
    assert set(after) == {"nats"}
    assert before_training["nats"] == pytest.approx(np.log(len(dataset.vocabulary) - 3), abs=0.01)
    assert after["nats"] < 0.75 * before_training["nats"]
    members = Trajectories.of(dataset, dataset.split("val"))
    tokens = np.minimum(np.diff(members.offsets) + 1, model.max_length).sum()
    assert after["nats"] == pytest.approx(-model.log_likelihood(members).sum() / tokens, rel=1e-5)


def test_samples_are_likelier_than_samples_of_another_model(
    model: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    own, other = (
        each.sample(200, anchors=anchors(dataset, 200)) for each in (model, fresh(NAME, dataset))
    )
    assert model.log_likelihood(own).mean() > model.log_likelihood(other).mean() + 5


# ---- the gradient of samples


def test_soft_samples_are_the_distributions_behind_the_samples(
    grouped: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    n = 40
    groups = np.arange(n) % len(DEFAULT_GROUPS)
    homes = anchors(dataset, n)
    soft = grouped.soft_sample(groups, homes, seed=6)
    made = grouped.sample(n, groups, homes, seed=6)
    assert soft.drawn_tokens is not None
    written = soft.drawn_tokens.numpy()
    assert np.array_equal(written[written >= HOME], made.tokens)
    rows = soft.tokens.detach().sum(-1).numpy()
    np.testing.assert_allclose(rows, written != PAD, atol=1e-5)
    assert not soft.tokens[..., [PAD, BOS, MASK]].any() and not soft.tokens[:, 0, EOS].any()
    taken = soft.tokens.gather(-1, soft.drawn_tokens[..., None]).squeeze(-1)  # (batch, any)
    logs = torch.where(soft.drawn_tokens != PAD, taken, 1.0).log().sum(1).detach()
    np.testing.assert_allclose(logs, grouped.log_likelihood(made, groups), rtol=1e-3)


def test_the_gradient_of_a_first_token_is_that_of_its_probability(
    grouped: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    n = 8
    token = HOME
    parameter = grouped.network.output.bias
    groups = np.zeros(n, dtype=np.int64)
    homes = anchors(dataset, n)

    def expected() -> Tensor:
        return grouped.soft_sample(groups, homes, seed=0).tokens[:, 0, token].sum()

    slope = torch.autograd.grad(expected(), parameter)[0][token]
    step = 1e-2
    with torch.no_grad():
        parameter[token] += step
        above = expected()
        parameter[token] -= 2 * step
        below = expected()
        parameter[token] += step
    assert float(slope) == pytest.approx(float((above - below) / (2 * step)), rel=1e-2)


def test_expected_transitions_are_those_of_samples(
    grouped: SequenceGenerator, dataset: TrajectoryDataset
) -> None:
    """The next token follows the sampled token, not the distribution it was drawn from."""
    n = 1_000
    rng = np.random.default_rng(0)
    groups = rng.integers(len(DEFAULT_GROUPS), size=n)
    homes = rng.choice(anchors(dataset, 500), n)
    feature = build_feature("transitions", dataset.vocabulary)
    counts = normalise(
        np.asarray(feature.counts(grouped.sample(n, groups, homes, seed=3)).sum(0)).ravel()
    )
    with torch.no_grad():
        soft = grouped.soft_sample(groups, homes, seed=3)
    gaps = [
        float(tv(counts, normalise(feature.soft(each).sum(0).double().numpy())))
        for each in (soft, SoftTrajectories(soft.tokens, homes))
    ]
    assert gaps[0] < 0.05 < gaps[1]


def test_dropout_is_used_in_training_only(dataset: TrajectoryDataset) -> None:
    made = fresh(NAME, dataset, network=OPTIONS[NAME]["network"] | {"dropout": 0.5}).with_groups(
        DEFAULT_GROUPS, 0
    )
    groups = np.zeros(20, dtype=np.int64)
    homes = anchors(dataset, 20)
    still = made.soft_sample(groups, homes, seed=1).tokens
    made.network.train()
    assert torch.equal(made.soft_sample(groups, homes, seed=1).tokens, still)
    assert made.network.training


# ---- training


class Watcher:
    """In a trainer's place: keeps the stages that it is given, and trains nothing."""

    seed = 0

    def __init__(self) -> None:
        self.stages: list[Any] = []

    def run(self, stage: Any) -> dict[str, float]:
        self.stages.append(stage)
        return {"loss": 0.0}


@pytest.mark.parametrize("name", [NAME, "vae", "point-process"])
def test_the_mean_loss_of_two_processes_is_the_loss_of_one(
    name: str, dataset: TrajectoryDataset
) -> None:
    options = {} if name == NAME else {"latent": OPTIONS[name]["latent"] | {"free_bits": 0.0}}
    watcher = Watcher()
    made = fresh(name, dataset, **options)
    made.fit(dataset, cast(Trainer, watcher))
    taught = made.with_groups(DEFAULT_GROUPS, 0)
    watcher.run(
        taught.weighted_fit_stage(
            dataset, labelled_draw(dataset, 0), "strong", cast(Trainer, watcher)
        )
    )
    for stage in watcher.stages:
        stirred(stage.network)

        def loss(share: Share, stage: Any = stage) -> float:
            torch.manual_seed(3)
            return float(stage.loss(stage.network, 3, share))

        halves = [loss(Share(rank, 2)) for rank in range(2)]
        assert np.mean(halves) == pytest.approx(loss(Share()), rel=1e-5)
        assert halves[0] != pytest.approx(halves[1], rel=1e-5)


def test_a_trajectory_counts_the_same_in_every_batch(dataset: TrajectoryDataset) -> None:
    """Of batches of short and of long ones the mean loss is that of all trajectories in them."""
    train = dataset.split("train")
    size = len(train) // 8
    by_length = train[np.argsort(dataset.lengths[train], kind="stable")]

    def in_order(n: int, step: int) -> Examples:
        return Examples(by_length[n * step : n * (step + 1)], np.full(n, UNKNOWN))

    made = fresh(NAME, dataset, length=64, training=OPTIONS[NAME]["training"] | {"batch": size})
    assert isinstance(made, SequenceGenerator)
    stage = made.training_stage(
        dataset, in_order, "transformer", cast(Trainer, Watcher()), fresh=True
    )
    with torch.no_grad():
        found = np.mean([float(stage.loss(made.network, step, Share())) for step in range(8)])
    expected = -made.log_likelihood(Trajectories.of(dataset, by_length[: 8 * size])).mean()
    assert found == pytest.approx(expected / (dataset.lengths[train] + 1).mean(), rel=1e-4)


def test_truncated_trajectories_are_counted(dataset: TrajectoryDataset) -> None:
    report = fresh(NAME, dataset, length=5).fit(dataset, cast(Trainer, Watcher()))
    lengths = [len(dataset.trajectory(int(index))) for index in dataset.split("train")]
    assert report["truncated"] == sum(length > 5 for length in lengths) > 0


class Crash(Exception):  # noqa: N818
    """The process dies here, as far as the trainer can tell."""


@pytest.mark.parametrize("name", [NAME, "vae", "point-process"])
def test_a_killed_and_resumed_training_writes_the_same_bytes(
    name: str, dataset: TrajectoryDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = {"training": OPTIONS[name]["training"] | {"steps": 12, "warmup": 3}}
    how: dict[str, Any] = {"config": {}, "quiet": True, "checkpoint_steps": 1}
    fresh(name, dataset, **brief).fit(dataset, make_trainer(tmp_path / "whole" / "training", **how))
    with monkeypatch.context() as patched:
        gather = TrajectoryDataset.gather
        calls = []

        def until_killed(self: TrajectoryDataset, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 8:
                raise Crash
            return gather(self, *arguments)

        patched.setattr(TrajectoryDataset, "gather", until_killed)
        with pytest.raises(Crash):
            fresh(name, dataset, **brief).fit(
                dataset, make_trainer(tmp_path / "killed" / "training", **how)
            )
    again = fresh(name, dataset, **brief)
    report = again.fit(dataset, make_trainer(tmp_path / "killed" / "training", **how))
    whole, killed = (
        tmp_path / where / "training" / "transformer-final.safetensors"
        for where in ("whole", "killed")
    )
    assert whole.read_bytes() == killed.read_bytes()
    assert report["transformer"]["nats"] > 0


# ---- its configuration


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_validates(name: str) -> None:
    config = build(AutoregressiveConfig, PRESETS[name], name)
    assert build(AutoregressiveConfig, config.model_dump(mode="json"), name) == config
    assert (config == AutoregressiveConfig()) == (name == "small")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"network": {"width": 30}}, "'network' is wrong: width 30 is not a multiple of heads 4"),
        ({"network": {"depht": 2}}, "unknown key 'depht' in 'network'; did you mean 'depth'?"),
        ({"training": {"learning_rate": 0}}, "'training.learning_rate' is wrong"),
        ({"length": 1}, "'length' is wrong"),
    ],
)
def test_an_invalid_configuration_is_refused_in_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError) as refused:
        build(AutoregressiveConfig, values, "train")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("train: ") and "\n" not in str(refused.value)


def test_training_reports_truncated_trajectories_and_the_length_to_set(
    dataset: TrajectoryDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    brief = OPTIONS[NAME] | {"training": OPTIONS[NAME]["training"] | {"steps": 1, "warmup": 0}}
    lengths = dataset.lengths[dataset.split("train")]
    for length, cut in ((4, True), (int(lengths.max()), False)):
        caplog.clear()
        values = brief | {"length": length}
        train(dataset.path, tmp_path / str(length), generator=NAME, values=values, execution=QUIET)
        assert (f"{np.mean(lengths > length):.0%}".replace("%", " %") in caplog.text) == cut
        assert (
            "have more than 4 tokens; the model truncates them. Pass --set length=" in caplog.text
        ) == cut
    advised = int(np.sort(lengths)[int(np.ceil(0.95 * (len(lengths) - 1)))])
    train(
        dataset.path,
        tmp_path / "advised",
        generator=NAME,
        values=brief | {"length": advised},
        execution=QUIET,
    )
    assert np.mean(lengths > advised) <= 0.05 and "cuts them off" not in caplog.text
