"""Latent diffusion as a whole: latents of a dataset, configuration, losses and report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mobatlas.config import build
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import EOS, FIRST_POI, HOME, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.latent_diffusion.autoencoder import (
    encode_split,
    set_statistics,
)
from mobatlas.generators.latent_diffusion.generator import (
    PRESETS,
    LatentDiffusion,
    LatentDiffusionConfig,
)
from mobatlas.generators.protocol import Draw, unlabelled
from mobatlas.generators.transformer import with_end
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.training.loop import Execution, Share, Stage, Trainer
from tests.networks import LATENT, new_model, stirred
from tests.tiny import OPTIONS, fresh, small_city


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"))


@pytest.fixture
def model(dataset: TrajectoryDataset) -> LatentDiffusion:
    return new_model(dataset)


def test_latents_on_disk_equal_those_in_memory_and_are_encoded_once(
    model: LatentDiffusion,
    dataset: TrajectoryDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    autoencoder = model.autoencoder
    path = tmp_path / "latents.npy"
    set_statistics(autoencoder, dataset)
    memory = encode_split(autoencoder, dataset, "train", None)
    disk = encode_split(autoencoder, dataset, "train", path)
    path.write_bytes(path.read_bytes()[:100])  # what a killed process left
    again = encode_split(autoencoder, dataset, "train", path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["latents.npy"]
    chosen = dataset.split("train")[::7]
    assert isinstance(disk.values, np.memmap) and isinstance(again.values, np.memmap)
    assert torch.equal(again.batch(chosen), memory.batch(chosen))


def test_a_batch_of_latents_is_the_encoding_of_its_trajectories(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    autoencoder = model.autoencoder
    set_statistics(autoencoder, dataset)
    latents = encode_split(autoencoder, dataset, "train", None)
    chosen = dataset.split("train")[[5, 0, 17, 5]]
    expected = autoencoder.standardise(model.encode(dataset.gather(chosen)))
    torch.testing.assert_close(
        latents.batch(chosen), expected, atol=3e-3, rtol=3e-3
    )  # half precision


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
    members = [
        dataset.gather(np.array([index]), model.max_length)[0] for index in dataset.split("train")
    ]
    ended = np.concatenate(
        [with_end(torch.from_numpy(tokens[None]).long(), model.max_length)[0] for tokens in members]
    )
    tokens = ended[ended != PAD]
    for token in (EOS, HOME, int(np.bincount(tokens)[FIRST_POI:].argmax()) + FIRST_POI):
        np.testing.assert_allclose(typical[token], encoded[tokens == token].mean(0), atol=2e-3)
    torch.testing.assert_close(typical[PAD], model.autoencoder.padding)
    assert bool(typical.isfinite().all()), "also of tokens that no trajectory has"


def test_the_denoiser_learns_which_tokens_the_latents_stand_for(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    """For a new denoiser all tokens are equally likely: its cross-entropy is log(vocabulary)."""
    found = {}
    for share in (0.25, 0.5, 1.0):
        options = OPTIONS["latent-diffusion"]["denoiser"] | {
            "cross_entropy": share,
            "self_conditioning": False,
        }
        model = new_model(dataset, denoiser=options)
        model.network.prototypes.copy_(set_statistics(model.autoencoder, dataset))
        trainer = Trainer(tmp_path, seed=0, config={})
        stage = model.training_stage(
            dataset, unlabelled(dataset, 0), "denoiser", trainer, fresh=True
        )
        torch.manual_seed(4)
        found[share] = stage.loss(model.network, 0, Share()).item()
    assert found[1.0] == pytest.approx(np.log(len(dataset.vocabulary)), rel=1e-5)
    assert found[1.0] - found[0.5] == pytest.approx((found[1.0] - found[0.25]) * 2 / 3, rel=1e-4)


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
    bart = config.autoencoder
    dit = config.denoiser
    diffusion = config.diffusion
    # shared diffusion settings, and the evaluation protocol: DDIM of 50 steps
    assert (diffusion.train_steps, diffusion.solver, diffusion.steps) == (1_000, "ddim", 50)
    # BART: layers, model dimension, FFN dimension, heads, max sequence length
    assert (bart.encoder_layers, bart.decoder_layers, bart.width, bart.feedforward, bart.heads) == (
        4,
        2,
        256,
        1_024,
        4,
    )
    assert config.length == 64
    # DiT: depth 8-12, hidden size 128-512, heads, input dimension, demo embedding dim
    assert (dit.depth, dit.width, dit.heads, bart.latent, dit.embedding) == (12, 512, 4, 256, 256)
    # pretraining: learning rate, batch size, warm-up
    for part in (bart, dit):
        assert (part.learning_rate, part.batch, part.warmup) == (1e-4, 512, 1_000)
    assert bart.weight_decay == 0.01
    # finetuning: learning rate 1e-5 to 1e-6; its batch is the denoiser's, within 256 to 1024
    assert config.weighted_fit.learning_rate == 1e-5


def test_the_papers_optimisers_are_adamw_and_adam_with_gradients_clipped_at_1(
    model: LatentDiffusion, dataset: TrajectoryDataset
) -> None:
    watcher = Watcher()
    model.fit(dataset, cast(Trainer, watcher))
    draw: Draw = unlabelled(dataset, 0)
    watcher.run(
        model.with_groups(DEFAULT_GROUPS, 0).weighted_fit_stage(
            dataset, draw, "strong", cast(Trainer, watcher)
        )
    )
    assert [(stage.name, stage.optimizer, stage.clip) for stage in watcher.stages] == [
        ("autoencoder", "adamw", 1.0),
        ("denoiser", "adam", 1.0),
        ("strong", "adam", 1.0),
    ]
    assert not any(parameter.requires_grad for parameter in model.autoencoder.parameters()), (
        "it is frozen by then"
    )


@pytest.mark.parametrize(
    ("number", "options"),
    [(0, {"noise": 0.0}), (0, {"noise": 0.3}), (1, {})],
    ids=["autoencoder", "autoencoder with noise", "denoiser"],
)
def test_the_mean_loss_of_two_processes_is_the_loss_of_one(
    dataset: TrajectoryDataset, number: int, options: dict[str, float]
) -> None:
    """Each draws what the whole batch needs and takes its rows of it."""
    model = fresh(
        "latent-diffusion",
        dataset,
        autoencoder=OPTIONS["latent-diffusion"]["autoencoder"] | options,
    )
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
        (
            {"autoencoder": {"width": 30}},
            "'autoencoder' is wrong: width 30 is not a multiple of heads 4",
        ),
        (
            {"denoiser": {"width": 36}},
            "'denoiser' is wrong: width 36 is not a multiple of twice the heads 4",
        ),
        (
            {"diffusion": {"steps": 20, "train_steps": 10}},
            "diffusion.steps is larger than diffusion.train_steps",
        ),
        ({"denoiser": {"depht": 2}}, "unknown key 'depht' in 'denoiser'; did you mean 'depth'?"),
        ({"autoencoder": {"learning_rate": 0}}, "'autoencoder.learning_rate' is wrong"),
        ({"length": 1}, "'length' is wrong"),
    ],
)
def test_an_invalid_configuration_is_refused_in_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError) as refused:
        build(LatentDiffusionConfig, values, "train")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("train: ") and "\n" not in str(refused.value)


def test_truncated_trajectories_are_counted(dataset: TrajectoryDataset) -> None:
    model = fresh("latent-diffusion", dataset, length=5)
    report = model.fit(dataset, cast(Trainer, Watcher()))
    lengths = [len(dataset.trajectory(int(index))) for index in dataset.split("train")]
    assert report["truncated"] == sum(length > 5 for length in lengths) > 0


def test_an_autoencoder_that_reconstructs_too_little_causes_a_warning(
    dataset: TrajectoryDataset, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"steps": 1, "batch": 8}
    small = {"encoder_layers": 1, "width": 32, "feedforward": 64, "latent": LATENT} | one
    model = fresh(
        "latent-diffusion",
        dataset,
        autoencoder=small,
        denoiser={"depth": 1, "width": 32, "heads": 2, **one},
    )
    with caplog.at_level(logging.WARNING, "mobatlas"):
        report = model.fit(dataset, Trainer(None, Execution(quiet=True, accelerator="cpu")))
    assert report["autoencoder"]["reconstruction"] < 0.95
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    share = 100 * report["autoencoder"]["reconstruction"]
    assert f"WARNING: the autoencoder reconstructs {share:.1f} % of held-out tokens" in warned[0]
    assert "autoencoder.steps" in warned[0]


def test_an_autoencoder_that_reconstructs_enough_causes_no_warning(
    model: LatentDiffusion, dataset: TrajectoryDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mobatlas"):
        model.fit(dataset, cast(Trainer, Watcher()))
    assert not caplog.records
