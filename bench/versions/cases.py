"""The cases of `bench.compare_versions`, with the option names of the base version.

Commands run in a folder of their own, with relative paths. A case writes to the folder or file of
its own name, `{out}`, which later cases read by that name; `inputs/` holds the files of
`bench.versions.inputs`. The output of commands with --json is compared as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A command, the cases whose outputs it reads, and the outputs that are compared."""

    name: str
    command: str
    needs: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None  # None: the output `{out}`
    code: int = 0  # the exit code of the base version
    fresh: bool = False  # start a new interpreter, for commands that start processes themselves

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of files and folders."""
        return (self.name,) if self.outputs is None else self.outputs


def _settings(text: str) -> str:
    return " ".join(f"--set {assignment}" for assignment in text.split())


TINY_NETWORK = (
    "length=12 network.depth=1 network.width=16 network.heads=2 network.embedding=8 "
    "training.steps=20 training.batch=32 training.warmup=2"
)
TINY_DIFFUSION = (
    "length=12 autoencoder.encoder_layers=1 autoencoder.width=32 autoencoder.feedforward=64 "
    "autoencoder.latent=8 autoencoder.steps=30 autoencoder.batch=16 autoencoder.warmup=2 "
    "denoiser.depth=1 denoiser.width=32 denoiser.heads=2 denoiser.embedding=8 "
    "denoiser.steps=20 denoiser.batch=16 denoiser.warmup=2 diffusion.steps=2"
)
TINY_LATENT = "latent.size=4 latent.depth=1 latent.warmup=10"
GENERATORS = {
    "latent-diffusion": _settings(TINY_DIFFUSION),
    "autoregressive": _settings(TINY_NETWORK),
    "vae": _settings(f"{TINY_NETWORK} {TINY_LATENT}"),
    "point-process": _settings(f"{TINY_NETWORK} {TINY_LATENT}"),
    "external": _settings("pool=inputs/pool.parquet"),
}
TEACHING = _settings("teaching.steps=6 teaching.warmup=2")
CALIBRATION = _settings("calibration.pool=64 calibration.candidates=2")
FINETUNE = _settings(
    "finetune.steps=4 finetune.batch=16 finetune.warmup=0 finetune.rollout_steps=2 "
    "finetune.validate_every=2 finetune.validation_samples=16"
)
CHECK_INS = _settings(
    "window.days=3 window.stride=3 quality.min_coverage=0 quality.min_tokens=2 "
    "anchors.require_both=false vocabulary_size=30"
)
GROUP = '"30-40, F"'

DATA = [
    Case(
        "city", "simulate --out {out} --users 160 --pois 20 --districts 4 --days 15 --seed 3 --json"
    ),
    Case(
        "city-options",
        "simulate --out {out} --users 60 --pois 30 --districts 3 --days 9 --seed 5 "
        "--divergence 0.2 --segregation 2 --set activity=1.5 --set dropout=0.2 --json",
    ),
    Case("dataset", "prepare city --out {out} --preset small --json", ("city",)),
    Case(
        "dataset-spark",
        "prepare city --out {out} --preset small --engine spark --json",
        ("city",),
        fresh=True,
    ),
    Case(
        "dataset-options",
        "prepare city --out {out} --json --set window.days=4 --set window.stride=2 "
        "--set window.origin=2024-03-05 --set vocabulary_size=9 --set anchors.infer=always "
        "--set quality.min_tokens=3 --set split.train=0.6 --set split.val=0.2 --set split.test=0.2",
        ("city",),
    ),
    Case("plain", f"prepare inputs/plain --out {{out}} {CHECK_INS} --json", ("city",)),
    Case(
        "plain-until-next",
        "prepare inputs/plain --out {out} --preset small --set missing_departure=until_next "
        "--set max_gap_hours=9 --set anchors.min_days=2 --json",
        ("city",),
    ),
    *(
        Case(
            name,
            f"prepare inputs/{name} --out {{out}} --format {reader} {CHECK_INS} --json",
            ("city",),
        )
        for name, reader in {
            "embee": "embee",
            "veraset": "veraset",
            "foursquare": "foursquare",
            "tist": "foursquare",
            "yjmob": "yjmob100k",
            "geolife": "geolife",
        }.items()
    ),
]

REGIONS = [
    *(
        Case(f"regions-{name.partition(':')[0]}", f"{MAKE} --partition {name}", ("dataset",))
        for MAKE in ("regions dataset --out {out} --json",)
        for name in ("demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:6:0.5")
    ),
    *(
        Case(f"regions-{name}", f"regions dataset --out {{out}} --json {options}", ("dataset",))
        for name, options in {
            "table": "--partition inputs/partition.csv --feature category",
            "poi": "--partition hot16 --feature poi --mask HOME --mask OTHER",
            "features": "--partition hot16 --feature poi --feature category --seed 4",
            "transitions": "--partition fullrank --feature transitions --feature distance",
            "hour": "--partition fullrank --feature hour",
            "districts": "--by home_district --feature category --feature transitions",
            "shuffled": "--by home_district --shuffle-regions",
            "same-people": "--by home_district --same-people",
            "census": "--by home_district --composition inputs/census.csv",
            "ages": "--by home_district --composition inputs/ages.csv --split-ages",
            "published": "--composition inputs/census.csv --aggregates inputs/aggregates.csv",
            "suppressed": "--partition hot16 --feature category --suppress 4 --round 5",
        }.items()
    ),
    Case(
        "regions-private",  # the noise is different in each run
        "regions dataset --out {out} --by home_district --epsilon 2 --max-visits 20",
        ("dataset",),
        outputs=("regions-private/composition.parquet", "regions-private/manifest.json"),
    ),
    Case("regions-refused", "regions dataset --out {out} --partition hot17", ("dataset",), code=2),
    *(
        Case(f"diagnose-{name}", f"diagnose regions-{name} --json", (f"regions-{name}",), ())
        for name in ("hot16", "rankdef", "districts", "published", "suppressed")
    ),
    Case(
        "diagnose-figure",
        "diagnose --composition inputs/census.csv --n 300 --json",
        ("city",),
        outputs=("diagnose-figure.png",),
    ),
    Case(
        "diagnose-ages",
        "diagnose --composition inputs/ages.csv --split-ages --n 200 --json",
        ("city",),
        (),
    ),
]

TRAIN = "train dataset --out {out} --json --quiet --generator"
TRAINING = [
    *(
        Case(
            name, f"{TRAIN} {name} {options} {TEACHING if name != 'external' else ''}", ("dataset",)
        )
        for name, options in GENERATORS.items()
    ),
    Case(
        "latent-diffusion-paper",
        f"{TRAIN} latent-diffusion --preset paper --seed 2 {TEACHING} "
        f"{GENERATORS['latent-diffusion']}",
        ("dataset",),
    ),
    Case(
        "latent-diffusion-map",
        f"{TRAIN} latent-diffusion {GENERATORS['latent-diffusion']} {TEACHING} "
        "--set denoiser.curves=4 --set denoiser.tastes=true --set diffusion.solver=ddim",
        ("dataset",),
    ),
    Case(
        "autoregressive-paper",
        f"{TRAIN} autoregressive --preset paper --seed 2 {GENERATORS['autoregressive']} {TEACHING}",
        ("dataset",),
    ),
    Case(
        "autoregressive-devices",
        f"{TRAIN} autoregressive --devices 2 {GENERATORS['autoregressive']}",
        ("dataset",),
        fresh=True,
    ),
]


def _supervise(model: str, name: str, options: str, regions: str = "regions-features") -> Case:
    command = f"supervise {model} {regions} --out {{out}} --json --quiet {options}"
    needs = (model, *([regions] if regions else []))
    refused = model == "external" and name in ("finetune", "strong")
    return Case(f"{model}.{name}", command, needs, code=2 if refused else 0)


SUPERVISION = [
    *(
        _supervise(model, name, options, *more)
        for model in GENERATORS
        for name, options, *more in (
            ("tilt", f"--strategy tilt {CALIBRATION}"),
            ("auto", f"--strategy auto --seed 7 {CALIBRATION}", "regions-published"),
            ("resample", f"--strategy resample {CALIBRATION}"),
            ("finetune", f"--strategy finetune {FINETUNE} {CALIBRATION}"),
            ("strong", "--strategy strong", ""),
            ("membership", f"--strategy tilt --membership {CALIBRATION}", "regions-census"),
        )
    ),
    *(
        _supervise("autoregressive", name, options, *more)
        for name, options, *more in (
            ("default-calibration", "--strategy tilt --set visits=false"),
            (
                "wide",
                f"--strategy tilt --set groups_explain=100 {CALIBRATION}",
                "regions-districts",
            ),
            ("suppressed", f"--strategy tilt {CALIBRATION}", "regions-suppressed"),
            ("scratch", f"--strategy tilt --from-scratch {CALIBRATION}"),
            ("strong-scratch", "--strategy strong --from-scratch", ""),
            ("tv", f"--strategy finetune --divergence tv {FINETUNE}"),
            ("kl", f"--strategy finetune --divergence kl {FINETUNE}"),
            ("hellinger", f"--strategy finetune --divergence hellinger {FINETUNE}"),
        )
    ),
    _supervise("autoregressive.tilt", "finetune", f"--strategy finetune {FINETUNE}"),
    _supervise("latent-diffusion-map", "tilt", f"--strategy tilt {CALIBRATION}"),
    _supervise("latent-diffusion-paper", "finetune", f"--strategy finetune {FINETUNE}"),
    _supervise("point-process", "hour", f"--strategy tilt {CALIBRATION}", "regions-hour"),
]


def _generate(name: str, model: str, options: str, fresh: bool = False) -> Case:
    command = f"generate {model} --out {{out}} --json --quiet {options}"
    return Case(f"{name}.parquet", command, (model,), fresh=fresh)


AUTOREGRESSIVE = {
    "region": "--n 20 --region D01 --regions regions-census",
    "people": "--anchors inputs/homes.csv",
    "anchors": "--anchors inputs/anchors.csv --seed 5",
    "people-calibrated": "--anchors inputs/homes.csv --calibrate",
    "disc": f"--n 20 --coarsen 3km --group {GROUP}",
    "grid": "--n 20 --coarsen grid:1km",
    "shard": "--n 600 --shard 2/3",
    "all": "--n 600",
}
SAMPLING = [
    *(
        _generate(f"{model}-{name}", f"{model}{version}", options)
        for model in GENERATORS
        for name, version, options in (
            ("baseline", "", "--n 40 --seed 1"),
            ("calibrated", ".tilt", f"--n 30 --group {GROUP} --calibrate"),
            ("resampled", ".resample", f"--n 30 --group {GROUP}"),
            ("members", ".membership", f"--n 30 --group {GROUP}"),
            ("group", ".finetune", f"--n 30 --group {GROUP} --calibrate"),
            ("labelled", ".strong", "--anchors inputs/homes.csv"),
        )
        if model != "external" or version in ("", ".tilt", ".resample", ".membership")
    ),
    *(
        _generate(f"sample-{name}", "autoregressive.membership", options)
        for name, options in AUTOREGRESSIVE.items()
    ),
    _generate("sample-devices", "autoregressive.tilt", "--n 600 --devices 2", fresh=True),
    _generate("sample-paper", "latent-diffusion-paper", "--n 20"),
    _generate("sample-map", "latent-diffusion-map.tilt", f"--n 20 --group {GROUP}"),
    Case(
        "refused.parquet",
        f"generate autoregressive --n 5 --group {GROUP} --out {{out}}",
        ("autoregressive",),
        code=2,
    ),
]

EVALUATION = [
    Case(
        "evaluation",
        "evaluate sample-people.parquet --dataset dataset "
        "--baseline autoregressive-baseline.parquet --json "
        "--strong autoregressive-labelled.parquet",
        (
            "sample-people.parquet",
            "autoregressive-baseline.parquet",
            "autoregressive-labelled.parquet",
        ),
        (),
    ),
    Case(
        "evaluation-times",
        "evaluate point-process-baseline.parquet --dataset dataset --split val --json",
        ("point-process-baseline.parquet",),
        (),
    ),
    Case("run", "run inputs/run.yaml --out {out} --json --quiet", ("city",)),
    Case(
        "audit",
        "audit run/samples/hot16.parquet --dataset run/dataset --json",
        ("run",),
        (),
    ),
    Case("run-unlabelled", "run inputs/unlabelled.yaml --out {out} --json --quiet", ("city",)),
    Case("report.html", "report run --out {out}", ("run",)),
    Case(
        "init.yaml",
        "init --visits city --composition inputs/census.csv --aggregates inputs/aggregates.csv "
        "--out {out}",
        ("city",),
    ),
    Case("init-by.yaml", "init --visits city --by home_district --out {out}", ("city",)),
]

CASES = [*DATA, *REGIONS, *TRAINING, *SUPERVISION, *SAMPLING, *EVALUATION]
