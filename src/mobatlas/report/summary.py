"""The summary of a run in plain sentences: what regions distinguish, and how close samples come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mobatlas.regions.recovery.recover import MOSTLY_PRIOR

HEADLINE = "poi"  # the metric of the summary


def summarise(results: Mapping[str, Mapping[str, Any]], labelled: bool) -> list[str]:
    """One paragraph for each kind of regions.

    `results` holds the diagnosis, the information about each group and the evaluation by name.
    """
    paragraphs = []
    for name, result in results.items():
        sentences = [*_identified(result), *_distance(result["evaluation"], labelled)]
        paragraphs.append(f"{name}: {' '.join(sentences)}")
    if not labelled:
        paragraphs.append(
            "Nobody in this dataset has a label. The report can therefore not measure how close "
            "samples of a group are to people of that group. It measures instead how well the "
            "model predicts regions of held-out people and regions that were left out."
        )
    return paragraphs


def _identified(result: Mapping[str, Any]) -> list[str]:
    """Which groups the regions distinguish."""
    diagnosis = result["diagnosis"]
    groups = len(diagnosis["groups"])
    rank = diagnosis["effective_rank"]
    regions = f"These {diagnosis['regions']} regions"
    sentences = [f"{regions} can distinguish all {groups} groups."]
    if rank < groups:
        sentences = [
            f"{regions} identify only {rank} of {groups} independent combinations of groups."
        ]
    vague = [name for name, share in result["information"].items() if share < MOSTLY_PRIOR]
    if vague:
        names = "any group" if len(vague) == groups else _listed(vague)
        verb = "their estimates stay" if len(vague) > 1 else "its estimate stays"
        sentences.append(f"They say little about {names}; {verb} close to the city average.")
    return sentences


def _distance(evaluation: Mapping[str, Any], labelled: bool) -> list[str]:
    """How close samples are to held-out people, or to their regions if there are no labels."""
    if labelled and evaluation["groups"]:
        return _group_distance(evaluation["groups"])
    people = evaluation.get("regional", {}).get("held_out_people")
    if not people:
        return []
    closer = "closer" if people["supervised"] < people["baseline"] else "no closer"
    return [
        f"Simulated regions are {people['supervised']:.4f} bits from the regions of held-out "
        f"people: {closer} than the model without groups ({people['baseline']:.4f})."
    ]


def _group_distance(scores: Mapping[str, Any]) -> list[str]:
    average = {label: each["average"][HEADLINE] for label, each in scores["scores"].items()}
    gap = scores["gap_closed_floor"].get(HEADLINE, {})
    sentence = (
        f"In the places they visit, samples of a group are {average['ours']:.3f} bits from "
        f"held-out people of that group (model without groups: {average['baseline']:.3f}; "
        f"real training people: {average['floor']:.3f})."
    )
    share = gap.get("share")
    if share is None:
        return [sentence, f"There is no gap to close: {gap.get('reason', 'none was measured')}."]
    if share > 0:
        return [sentence, f"This closes {share:.0%} of the gap from baseline to floor."]
    return [
        sentence,
        "This is no closer than the model without groups: the regions do not identify these groups "
        "well enough. Prefer the baseline.",
    ]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
