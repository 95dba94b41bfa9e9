"""Build regions from a controlled partition, a column of people, or two published tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mobatlas.config import MIN_PEOPLE
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import FIRST_POI, Floats, Ints
from mobatlas.errors import MobatlasError, refuse_faults, suggestion
from mobatlas.features.maps import FEATURES, FeatureMap, build_feature, feature_maps
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import (
    TableContext,
    aggregates_from_dataset,
    compare_with_dataset,
    read_aggregates,
    refuse_interchanged,
)
from mobatlas.regions.composition import composition_from_labels, region_codes
from mobatlas.regions.disclosure import NO_DISCLOSURE, Disclosure
from mobatlas.regions.group_table import read_group_table
from mobatlas.regions.labelled import labelled_people
from mobatlas.regions.margins import Census, compare_panel, match_regions, panel_sentences
from mobatlas.regions.partitions import (
    assign,
    derive_seed,
    first_half,
    nominal_partition,
    region_sizes,
    renumber,
    restrict,
    shuffle_people,
)
from mobatlas.regions.polygons import regions_of_homes
from mobatlas.regions.types import Aggregates, Composition, Population, Regions, bins_by_map

MAX_NOMINAL_CELLS = 100_000  # a larger nominal P is not written to the manifest
LEAST_PEOPLE = 2  # behind composition and aggregates: one person has no variance
MAX_LISTED = 3  # regions that a warning names


@dataclass(frozen=True)
class RegionsOptions:
    """Where composition and aggregates come from, and how they are counted.

    Choose `partition`, `by`, or `composition` with `aggregates`.

    Parameters
    ----------
    partition
        A controlled partition: demogroups, fullrank, rankdef, messy, hot16, dirichlet:G:alpha, or
        the path of a composition table.
    by
        A region column of people. The composition is counted on labelled people, or read from
        `composition`.
    composition, aggregates
        Published tables. Several tables of composition, such as one of ages and one of genders, are
        combined by raking.
    features
        Feature maps. Default: poi for a partition, category for `by` (because places depend on
        where people live), and all maps of a published table.
    mask
        Tokens to leave out: HOME, WORK or OTHER.
    shuffle_regions
        Exchange people or compositions between regions: a negative control.
    same_people
        With `by`: count composition and aggregates on the same people, not on disjoint halves.
    straddle
        "uniform" spreads a census age range that covers two groups evenly over its years.
    rest
        With `partition`: keep the mean of everybody, so that people outside the regions count as
        one more region. Without it the regions stand alone, as in the paper.
    disclosure
        Disclosure control of aggregates that are counted from visits.
    joint_prior
        With several tables of composition: a table with the joint distribution of their attributes.
        By default attributes are independent within each region.
    labelled
        People whose attributes are known, as further evidence. A table of user_id and attributes
        for some people of the dataset, or a folder with visits and people of a separate survey.
    labelled_sample
        For experiments: this many random labelled training people, instead of `labelled`.
    group_tables
        Published tables of mean visits by group, or by some of the attributes.
    rename
        Columns of these tables: the name in a table for the expected name.
    per
        The period of the values of published tables, by file name: day, week, month, window,
        share, "10 days" or "2024-03-01 to 2024-03-31".
    require_per
        Refuse a published table of means or totals without a period, even if its values agree with
        those of the dataset's windows.
    home_panel
        With `aggregates` without people: a table of the devices that live in each region.
    polygons
        A GeoJSON or GeoPackage file: regions are its polygons around homes, named by their
        property `by`.
    min_people
        Regions with fewer people behind composition or aggregates are left out, or refused where
        a partition has them; groups with fewer are refused.

    Examples
    --------
    >>> RegionsOptions(by="home_district", features=("category",)).partition is None
    True
    """

    partition: str | None = None
    by: str | None = None
    composition: Path | str | Sequence[Path | str] | None = None
    aggregates: Path | str | None = None
    features: Sequence[str] | None = None
    mask: Sequence[str] = ()
    shuffle_regions: bool = False
    same_people: bool = False
    straddle: str = "refuse"
    rest: bool = True
    disclosure: Disclosure = NO_DISCLOSURE
    joint_prior: Path | str | None = None
    labelled: Path | str | None = None
    labelled_sample: int | None = None
    group_tables: Sequence[Path | str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    per: Mapping[str, str] = field(default_factory=dict)
    require_per: bool = False
    home_panel: Path | str | None = None
    polygons: Path | str | None = None
    min_people: int = MIN_PEOPLE

    def __post_init__(self) -> None:
        sources = (self.partition, self.by, self.composition, self.aggregates)
        chosen = tuple(source is not None for source in sources)
        by_column = chosen[:2] == (False, True) and not chosen[3]
        tables = {Path(path).name for path in (self.aggregates or "", *self.group_tables)} - {""}
        undescribed = ", ".join(self.per.keys() - tables)
        faults = {
            "choose one of --partition NAME, --by COLUMN (with --composition FILE for a census), "
            "or --composition FILE with --aggregates FILE": not by_column
            and chosen not in ((True, False, False, False), (False, False, True, True)),
            "--same-people needs --by COLUMN without --composition; remove it": self.same_people
            and (not by_column or self.composition is not None),
            "--without-rest needs --partition NAME; remove it": not self.rest
            and self.partition is None,
            "--suppress, --round and --epsilon apply to aggregates counted from visits, not "
            f"to the published table {self.aggregates}; remove them": self.disclosure.active
            and self.aggregates is not None,
            "choose one of --labelled PATH and --labelled-sample N, not both": self.labelled
            is not None
            and self.labelled_sample is not None,
            "--joint-prior needs tables of --composition; remove it": self.joint_prior is not None
            and self.composition is None,
            "--polygons needs --by with the property that names each polygon": self.polygons
            is not None
            and self.by is None,
            "--home-panel needs --aggregates; remove it": self.home_panel is not None
            and self.aggregates is None,
            f"--min-people {self.min_people}: give 0 or more": self.min_people < 0,
            f"--per {undescribed}: no table of aggregates or group table has this name (given: "
            f"{', '.join(sorted(tables)) or 'none'})": undescribed,
        }
        refuse_faults(faults)

    @property
    def least(self) -> int:
        """The fewest people behind the composition or the aggregates of a region."""
        return max(self.min_people, LEAST_PEOPLE)

    @property
    def census(self) -> Census | None:
        """The tables of the composition."""
        tables = self.composition
        if tables is None:
            return None
        tables = (tables,) if isinstance(tables, Path | str) else tuple(tables)
        return Census(tables, self.joint_prior, self.straddle, self.rename)


@dataclass(frozen=True)
class BuiltRegions:
    """Regions before they are written."""

    regions: Regions
    validation: Aggregates | None = None
    region_of_person: Ints | None = None  # (people,) of train and val people, -1: none
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def build_from_dataset(
    dataset: TrajectoryDataset, options: RegionsOptions, seed: int
) -> BuiltRegions:
    """Build regions from the source that the options choose, and add the evidence beside them."""
    for path in () if options.census is None else options.census.tables:
        refuse_interchanged(Path(path), "--composition")
    if options.aggregates is not None:
        refuse_interchanged(Path(options.aggregates), "--aggregates")
    if options.partition is not None:
        built = _from_partition(dataset, options.partition, options, seed)
    elif options.by is not None:
        built = _from_column(dataset, options.by, options, seed)
    else:
        built = _from_tables(dataset, options, seed)
    where = "the labels" if options.census is None else options.census.path
    built.regions.composition.refuse_small_groups(where, options.min_people)
    if options.census is not None and not options.shuffle_regions:
        built = _with_panel(built)
    return _with_evidence(dataset, built, options, seed)


def _with_panel(built: BuiltRegions) -> BuiltRegions:
    """Compare the people behind the aggregates with a census of the same regions."""
    regions = built.regions
    panel = None
    if not regions.aggregates.pooled:
        panel = compare_panel(regions.composition, regions.aggregates.n)
    if panel is None:
        return built
    notes, warnings = panel_sentences(panel)
    census, n = regions.composition.n, regions.aggregates.n
    if (n > census).any():
        worst = int(np.argmax(n / census))
        warnings.append(
            f"{int((n > census).sum()):,} regions have more people in the aggregates than in the "
            f"census (for example '{regions.composition.regions[worst]}', {n[worst]:,.0f} and "
            f"{census[worst]:,.0f}): is the census in thousands?"
        )
    return replace(
        built,
        regions=replace(regions, details=regions.details | {"panel": panel}),
        notes=[*built.notes, *notes],
        warnings=[*built.warnings, *warnings],
    )


def _from_partition(
    dataset: TrajectoryDataset, name: str, options: RegionsOptions, seed: int
) -> BuiltRegions:
    """Assign labelled training and validation people to the regions of a partition."""
    groups, labels = _labels(dataset, f"--partition {name}", "")
    maps = _feature_maps(dataset, options, "poi")
    nominal = nominal_partition(name, groups, seed)
    splits = {
        split: np.intersect1d(dataset.split_people(split), dataset.person)
        for split in ("train", "val")
    }
    region = np.full(len(labels), -1, dtype=np.int64)
    notes = []
    for split, members in splits.items():
        try:
            region[members] = assign(labels[members], nominal, derive_seed(seed, split))
        except MobatlasError as error:
            if split == "train":
                message = str(error).replace("--partition", f"--partition {name}", 1)
                raise MobatlasError(message) from None
            notes.append(
                f"no aggregates of validation people: these {len(members):,} people are too few "
                "for this partition"
            )
    train = dataset.split_people("train")
    composition = composition_from_labels(labels, restrict(region, train), groups, nominal.regions)
    if options.shuffle_regions:
        # Only aggregates are shuffled: a composition of the shuffled people would be correct.
        # Surplus people are included, so that the rest of the population is shuffled too.
        labelled = [members[labels[members] >= 0] for members in splits.values()]
        region = shuffle_people(region, labelled, seed)
    counted = restrict(region, train)
    _refuse_small_regions(name, nominal, region_sizes(counted, len(nominal.regions)), options)
    assigned = int(np.count_nonzero(counted >= 0))
    population = _population(dataset, maps, labels, groups, splits["train"])
    details = {
        "source": "partition",
        "partition": name if Path(name).suffix == "" else Path(name).name,
        "separation": "controlled partition",
        # A large nominal P is left out: name and seed reproduce it.
        "nominal": {"regions": list(nominal.regions), "shares": nominal.shares.tolist()}
        if nominal.shares.size <= MAX_NOMINAL_CELLS
        else None,
        "people": {"assigned": assigned, "surplus": round(population.n) - assigned},
    }
    aggregates = aggregates_from_dataset(
        dataset, maps, counted, "train", nominal.regions, options.disclosure
    )
    # Exact totals of the population would reveal what disclosure control hides.
    published = population if options.rest and not options.disclosure.active else None
    return BuiltRegions(
        Regions(composition, aggregates, True, details, published),
        validation=_validation(dataset, maps, region, nominal.regions, options.disclosure),
        region_of_person=region,
        notes=notes,
        warnings=_missing_categories(dataset, maps),
    )


def _from_column(
    dataset: TrajectoryDataset, by: str, options: RegionsOptions, seed: int
) -> BuiltRegions:
    """Regions where people live, with a census or labels of other people as composition."""
    notes: list[str] = []
    if options.polygons is not None:
        homes = dataset.anchors[:, :2]
        region_of_person = regions_of_homes(Path(options.polygons), by, homes, notes)
    elif by in dataset.region_columns:
        region_of_person = dataset.people[by].to_pylist()
    else:
        known = ", ".join(dataset.region_columns) or "none"
        raise MobatlasError(
            f"--by {by}: {dataset.path} has no such region column"
            f"{suggestion(by, dataset.region_columns)} (known: {known})"
        )
    maps = _feature_maps(dataset, options, "category")
    region, names = region_codes(region_of_person)
    region = restrict(region, dataset.person)
    if options.shuffle_regions:
        placed = np.flatnonzero(region >= 0)
        splits = [np.intersect1d(dataset.split_people(s), placed) for s in ("train", "val")]
        region = shuffle_people(region, splits, seed)
    train = restrict(region, dataset.split_people("train"))
    warnings = _missing_categories(dataset, maps)
    counted = train
    if options.composition is not None:
        separation = "census file"
        composition, usable = _census(dataset, options, names, notes, warnings)
    else:
        separation = "same people" if options.same_people else "disjoint halves"
        composition, usable, counted = _split_people(dataset, options, train, names, seed)
    rows = np.flatnonzero(region_sizes(counted, len(names))[usable] >= options.least)
    if not len(rows):
        raise _no_region(options)
    remaining, number = renumber(names, usable[rows])
    small = {*(names if options.census is None else composition.regions)} - {*remaining}
    warnings += _small_warning(sorted(small), by, options.least)
    details = {
        "source": "by",
        "by": by,
        "polygons": None if options.polygons is None else Path(options.polygons).name,
        "separation": separation,
        **(options.census.details if options.census is not None else {"census": None}),
        "dropped_regions": len(names) - len(remaining),
    }
    aggregates = aggregates_from_dataset(
        dataset, maps, number[counted], "train", remaining, options.disclosure
    )
    centroids = _centroids(dataset, number[train], len(remaining))
    return BuiltRegions(
        Regions(composition.select(rows), aggregates, False, details, centroids=centroids),
        validation=_validation(dataset, maps, number[region], remaining, options.disclosure),
        region_of_person=number[region],
        notes=notes,
        warnings=warnings,
    )


def _from_tables(dataset: TrajectoryDataset, options: RegionsOptions, seed: int) -> BuiltRegions:
    """The regions that two published tables have in common."""
    census = options.census
    assert census is not None and options.aggregates is not None
    published = Path(options.aggregates)
    notes: list[str] = []
    p = census.read(dataset.groups, notes=notes)
    context = table_context(dataset, options, published, p.regions)
    v, days = read_aggregates(published, context, notes)
    maps = _feature_maps(dataset, options, *bins_by_map(v.features))
    columns = _columns_of(maps, v.features, published)
    row = match_regions(v.regions, p.regions, f"{published.name} and {census.name}", notes)
    people = p.n[row] if v.pooled else np.minimum(p.n[row], v.n)
    is_small = (row >= 0) & (people < options.min_people)
    small = [v.regions[number] for number in np.flatnonzero(is_small).tolist()]
    keep = np.flatnonzero((row >= 0) & ~is_small)
    if not len(keep):
        raise MobatlasError(
            f"{published}: every region has fewer than {options.min_people} people; give larger "
            "regions, or lower --min-people"
            if small
            else f"{census.path} and {published}: no region in common ('{p.regions[0]}' in one, "
            f"'{v.regions[0]}' in the other); use the same ids in both"
        )
    rows = row[keep]
    if options.shuffle_regions:
        rows = np.random.default_rng(derive_seed(seed, "shuffle")).permutation(rows)
    aggregates = v.select(keep).select_features(columns)
    only_in_census = [p.regions[number] for number in np.setdiff1d(np.arange(len(p.regions)), row)]
    only_in_aggregates = [v.regions[number] for number in np.flatnonzero(row < 0).tolist()]
    details = {
        "source": "tables",
        "separation": "published tables",
        **census.details,
        "aggregates": published.name,
        "days": None if days is None or aggregates.pooled else days,
        "only_in_composition": len(only_in_census),
        "only_in_aggregates": len(only_in_aggregates),
    }
    return BuiltRegions(
        Regions(replace(p.select(rows), regions=aggregates.regions), aggregates, False, details),
        notes=notes,
        warnings=[
            *_unmatched_warning(
                only_in_census, census.name, published.name, only_in_aggregates or v.regions
            ),
            *_unmatched_warning(
                only_in_aggregates, published.name, census.name, only_in_census or p.regions
            ),
            *_small_warning(small, published.name, options.min_people),
            *compare_with_dataset(
                published, (aggregates, days), dataset, options.mask, options.require_per
            ),
        ],
    )


def _columns_of(maps: Sequence[FeatureMap], features: Sequence[str], published: Path) -> Ints:
    """The columns of a published table that belong to feature maps."""
    bins = {name for each in maps for name in each.bins}
    columns = np.flatnonzero([name in bins for name in features])
    if not len(columns):
        raise MobatlasError(
            f"{published}: the table has no feature of {', '.join(each.name for each in maps)}; "
            "choose another --feature"
        )
    return columns


def table_context(
    dataset: TrajectoryDataset, options: RegionsOptions, published: Path, regions: Sequence[str]
) -> TableContext:
    """What aggregates are read for: the features and places of a dataset, and the regions."""
    return TableContext(
        {name for each in feature_maps() for name in build_feature(each, dataset.vocabulary).bins},
        dataset.vocabulary,
        dataset.window_days,
        options.per.get(published.name),
        options.home_panel,
        regions,
        options.rename,
    )


def _with_evidence(
    dataset: TrajectoryDataset, built: BuiltRegions, options: RegionsOptions, seed: int
) -> BuiltRegions:
    """Add labelled people and group tables, and the parent of each feature."""
    parts = []
    source = options.labelled_sample if options.labelled is None else Path(options.labelled)
    if source is not None:
        maps = _labelled_maps(dataset, built.regions, options)
        where = built.region_of_person
        parts.append(
            labelled_people(dataset, source, maps, built.regions, where, seed, options.rename)
        )
    parts += [
        read_group_table(
            path,
            dataset,
            built.regions,
            options.mask,
            options.rename,
            options.per.get(Path(path).name),
            options.require_per,
        )
        for path in options.group_tables
    ]
    names = [*built.regions.aggregates.features]
    names += [name for part in parts for name in part.evidence.features]
    parents = {name: parent for name in names if (parent := dataset.vocabulary.parents.get(name))}
    return replace(
        built,
        regions=replace(
            built.regions, evidence=tuple(part.evidence for part in parts), parents=parents
        ),
        notes=[*built.notes, *(note for part in parts for note in part.notes)],
        warnings=[*built.warnings, *(warning for part in parts for warning in part.warnings)],
    )


def _labelled_maps(
    dataset: TrajectoryDataset, regions: Regions, options: RegionsOptions
) -> list[FeatureMap]:
    """The feature maps of the aggregates, places, and categories if there are any."""
    names = [*bins_by_map(regions.aggregates.features), "poi"]
    if any(dataset.vocabulary.categories[FIRST_POI:]):
        names.append("category")
    return [build_feature(name, dataset.vocabulary, options.mask) for name in dict.fromkeys(names)]


def _census(
    dataset: TrajectoryDataset,
    options: RegionsOptions,
    names: Sequence[str],
    notes: list[str],
    warnings: list[str],
) -> tuple[Composition, Ints]:
    """A census of the regions of people, and the numbers of these regions."""
    census = options.census
    assert census is not None
    published = census.read(dataset.groups, notes=notes)
    where = f"{options.by} and {census.name}"
    row = match_regions(names, published.regions, where, notes)  # (regions,), -1: not in the census
    usable = np.flatnonzero(row >= 0)
    # A census may cover more regions than the data.
    missing = [names[number] for number in np.flatnonzero(row < 0).tolist()]
    if not len(usable):
        raise MobatlasError(
            f"--by {options.by}: no region is also in {census.path} ('{names[0]}' in one, "
            f"'{published.regions[0]}' in the other); choose a coarser column or check its ids"
        )
    warnings += _unmatched_warning(missing, str(options.by), census.name, published.regions)
    regions = tuple(names[number] for number in usable.tolist())
    return replace(published.select(row[usable]), regions=regions), usable


def _split_people(
    dataset: TrajectoryDataset,
    options: RegionsOptions,
    train: Ints,
    names: Sequence[str],
    seed: int,
) -> tuple[Composition, Ints, Ints]:
    """Composition of labelled people, its region numbers, and the people behind the aggregates."""
    groups, labels = _labels(
        dataset, f"--by {options.by}", "; pass a census with --composition FILE"
    )
    with_labels = restrict(train, np.flatnonzero(labels >= 0))
    counted = with_labels
    if not options.same_people:
        first = first_half(dataset, seed)
        with_labels = restrict(with_labels, np.flatnonzero(first))
        counted = restrict(train, np.flatnonzero(~first))
    usable = np.flatnonzero(region_sizes(with_labels, len(names)) >= options.least)
    if not len(usable):
        raise _no_region(options)
    remaining, number = renumber(names, usable)
    return composition_from_labels(labels, number[with_labels], groups, remaining), usable, counted


def _no_region(options: RegionsOptions) -> MobatlasError:
    lack = f"has {options.least} people for composition and {options.least} for aggregates"
    if options.census is not None:
        lack = f"of {options.census.path} has {options.least} people"
    return MobatlasError(
        f"--by {options.by}: no region {lack}; choose a coarser column, check its ids, or lower "
        "--min-people"
    )


def _refuse_small_regions(
    name: str, nominal: Composition, sizes: Ints, options: RegionsOptions
) -> None:
    if sizes.min() < options.min_people:
        raise MobatlasError(
            f"--partition {name}: region '{nominal.regions[int(sizes.argmin())]}' would have "
            f"{sizes.min()} people, fewer than {options.min_people}; choose a partition with fewer "
            "regions, use more data, or lower --min-people"
        )


def _small_warning(regions: Sequence[str], source: str, fewest: int) -> list[str]:
    """A warning about regions with few people, which are left out."""
    if not regions:
        return []
    return [
        f"regions of {source} with fewer than {fewest} people behind composition or aggregates are "
        f"left out: {len(regions):,} "
        f"({_listed(regions)}); "
        "merge them with their neighbours, or lower --min-people"
    ]


def _listed(regions: Sequence[str]) -> str:
    """The names of the first regions."""
    names = ", ".join(f"'{name}'" for name in regions[:MAX_LISTED])
    return f"{names}{', ...' if len(regions) > MAX_LISTED else ''}"


def _population(
    dataset: TrajectoryDataset,
    maps: Sequence[FeatureMap],
    labels: Ints,
    groups: Groups,
    people: Ints,
) -> Population:
    """Composition and mean counts of the people with labels among these training people."""
    everyone = np.full(len(labels), -1, dtype=np.int64)
    everyone[people[labels[people] >= 0]] = 0
    composition = composition_from_labels(labels, everyone, groups, ("population",))
    aggregates = aggregates_from_dataset(dataset, maps, everyone, "train", ("population",))
    return Population(composition.shares[0], aggregates.values[0], float(aggregates.n[0]))


def _validation(
    dataset: TrajectoryDataset,
    maps: list[FeatureMap],
    region: Ints,
    regions: Sequence[str],
    disclosure: Disclosure,
) -> Aggregates | None:
    """V of validation people, for the regions that have any."""
    val = restrict(region, dataset.split_people("val"))
    present = np.flatnonzero(region_sizes(val, len(regions)))
    if not len(present):
        return None
    names, number = renumber(regions, present)
    return aggregates_from_dataset(dataset, maps, number[val], "val", names, disclosure)


def _centroids(dataset: TrajectoryDataset, region: Ints, regions: int) -> Floats | None:
    """The mean home (regions, 2) of the people of each region; None if a region has no home.

    `region` (people,) has region numbers, -1 for none.
    """
    homes = dataset.anchors[:, :2]
    usable = (region >= 0) & ~np.isnan(homes).any(1)
    n = np.bincount(region[usable], minlength=regions)
    if not n.all():
        return None
    return np.stack(
        [np.bincount(region[usable], homes[usable, axis], regions) / n for axis in (0, 1)], axis=1
    )


def _feature_maps(
    dataset: TrajectoryDataset, options: RegionsOptions, *default: str
) -> list[FeatureMap]:
    return [
        build_feature(name, dataset.vocabulary, options.mask)
        for name in options.features or default
    ]


def _labels(dataset: TrajectoryDataset, option: str, advice: str) -> tuple[Groups, Ints]:
    if dataset.groups is None or dataset.labels() is None:
        raise MobatlasError(f"{option}: {dataset.path} has no labels to count groups{advice}")
    return dataset.groups, dataset.person_groups()


def _unmatched_warning(
    regions: Sequence[str], present: str, absent: str, others: Sequence[str]
) -> list[str]:
    """A warning about regions that are missing from the other table, which has `others`."""
    if not regions:
        return []
    count = f"{len(regions):,} region{'s' if len(regions) > 1 else ''}"
    return [
        f"{count} of {present} {'are' if len(regions) > 1 else 'is'} left out, because {absent} "
        f"has no such region ({_listed(regions)}; its ids are like '{others[0]}'); do both use the "
        "same ids?"
    ]


def _missing_categories(dataset: TrajectoryDataset, maps: Sequence[FeatureMap]) -> list[str]:
    """A warning about category features of places without categories."""
    names = [each.name for each in maps if FEATURES[each.name].needs_categories]
    if not names or any(dataset.vocabulary.categories[FIRST_POI:]):
        return []
    return [
        f"no place has a category, so {' and '.join(names)} can only distinguish home, work and "
        "other; add a column category to the visits"
    ]
