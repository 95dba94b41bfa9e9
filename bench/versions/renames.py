"""The map from names of the base version to names of the new version. Extend it with each rename.

A rule of `config_keys`, `json_keys` or `tensors` is one name or several joined by dots, and applies
wherever these names follow each other in a path: `"teaching": "weighted_fit"` renames
`teaching.steps`, `"report.told": "report.identified"` renames `told` below `report` only. An empty
new name removes the level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Rules = Mapping[str, str]  # old name -> new name
Path = tuple[str, ...]  # keys from the root of a document to a value


@dataclass(frozen=True)
class Renames:
    """What is called differently in the new version, and what is not compared."""

    words: Rules = field(default_factory=dict)  # of the command line: commands, options, values
    config_keys: Rules = field(default_factory=dict)  # of YAML, --set, and configurations in JSON
    json_keys: Rules = field(default_factory=dict)
    columns: Rules = field(default_factory=dict)  # of Parquet, Arrow and CSV
    tensors: Rules = field(default_factory=dict)
    files: Rules = field(default_factory=dict)  # a file or folder name inside an output
    values: Rules = field(default_factory=dict)  # strings in JSON and in columns
    ignored_keys: frozenset[str] = frozenset()  # of JSON: the values differ between any two runs
    ignored_paths: frozenset[Path] = frozenset()  # from the root of a JSON document
    prose_keys: frozenset[str] = frozenset()  # of JSON: text; only how many there are is compared
    ignored_columns: frozenset[str] = frozenset()
    ignored_files: frozenset[str] = frozenset()


RENAMES = Renames(
    words={},
    config_keys={
        "teaching": "weighted_fit",
        "tastes": "group_bias",
        "nearness": "distance_bias",
        "curves": "distance_curves",
        "masked": "mask_share",
        "span": "mask_span",
        "emphasis": "timestep_emphasis",
        "null": "group_dropout",
    },
    json_keys={
        "groups.floor_closed": "groups.gap_closed_floor",
        "groups.gap_closed": "groups.gap_closed_strong",
        "everybody.floor_closed": "everybody.gap_closed_floor",
        "everybody.gap_closed": "everybody.gap_closed_strong",
        "about": "subject",
        "yardstick": "metric_spec",
        "told": "conditioned",
        "given": "fixed_anchors",
        "way": "source",
    },
    columns={"closed": "gap closed, floor", "gap closed": "gap closed, strong", "of": "table"},
    tensors={
        "nearness": "distance_bias",
        "nearness.bend": "distance_bias.knot_values",
        "nearness.kind": "distance_bias.place_scale",
        "nearness.where": "distance_bias.coordinates",
        "nearness.there": "distance_bias.has_coordinates",
        "tastes": "group_bias",
        "conditioning.groups.out": "conditioning.groups.to_condition",
        "denoiser.anchors": "denoiser.conditioning.anchors",
        "denoiser.group": "denoiser.conditioning.groups",
        "denoiser.centre": "denoiser.conditioning.centre",
        "denoiser.extent": "denoiser.conditioning.extent",
        "decoder.writer": "decoder.transformer",
        "gap.given": "gap.tokens",
        "stay.given": "stay.tokens",
        "given": "fixed_anchors",
    },
    files={"stages.json": "steps.json", "places.parquet": "centroids.parquet"},
    values={
        "given": "fixed_anchors",
        "closed": "gap closed, floor",
        "gap closed": "gap closed, strong",
        "Trajectories of one": "Trajectories, unique",
        "5-grams of one": "5-grams, unique",
        "Member AUC": "Membership AUC",
        "Member TPR": "Membership TPR",
        "Home and work of one": "Home and work, unique",
        "Member AUC, anchors": "Anchors AUC",
        "Member TPR, anchors": "Anchors TPR",
        "samples near by": "nearby samples",
        "closest sample, beside reference": "closest sample, against reference",
        "likelihood, beside reference": "likelihood, against reference",
        "5-grams that reference lacks": "5-grams not in reference",
    },
    ignored_keys=frozenset(
        {"versions", "files", "hash", "content_hash", "sha256", "dataset_hash", "made_of"}
        | {"path", "seconds", "examples_per_second", "trajectories_per_second", "peak_gb"}
        | {"bytes", "version", "inputs"}
    ),
    ignored_paths=frozenset({("format",)}),  # of a folder; readers of data have a key of that name
    prose_keys=frozenset(
        {"warnings", "notes", "note", "reason", "advice", "sentence", "action", "caption"},
    ),
    ignored_columns=frozenset(),
    ignored_files=frozenset(),
)


def rename_path(path: Path, rules: Rules) -> Path:
    """Apply the longest rule that matches at each level of a path."""
    parsed = {tuple(old.split(".")): new for old, new in rules.items()}
    longest = max(map(len, parsed), default=0)
    renamed: list[str] = []
    position = 0
    while position < len(path):
        for size in range(longest, 0, -1):
            new = parsed.get(path[position : position + size])
            if new is not None and position + size <= len(path):
                renamed += [name for name in new.split(".") if name]
                position += size
                break
        else:
            renamed.append(path[position])
            position += 1
    return tuple(renamed)


def rename_command(words: list[str], renames: Renames = RENAMES) -> list[str]:
    """A command line of the base version as the new version spells it."""
    renamed: list[str] = []
    for word in words:
        new = renames.words.get(word, word)
        if renamed and renamed[-1] == renames.words.get("--set", "--set") and new == word:
            key, _, value = word.partition("=")
            new = ".".join(rename_path(tuple(key.split(".")), renames.config_keys)) + "=" + value
        renamed += [new] if new else []
    return renamed


def rename_config(config: object, renames: Renames = RENAMES) -> object:
    """A configuration of the base version with the keys of the new version."""
    renamed: dict[str, object] = {}
    for path, value in _leaves(config, ()):
        *parents, name = rename_path(path, renames.config_keys)
        place = renamed
        for parent in parents:
            place = place.setdefault(parent, {})  # type: ignore[assignment]
        place[name] = value
    return renamed


def _leaves(value: object, path: Path) -> list[tuple[Path, object]]:
    if isinstance(value, dict) and value:
        return [leaf for key in value for leaf in _leaves(value[key], (*path, str(key)))]
    return [(path, value)]
