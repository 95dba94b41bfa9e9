"""What a run found, in plain words: what was learnt, what could not be, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mobatlas.regions.recovery.recover import MOSTLY_PRIOR

HEADLINE = "poi"  # the metric that the first sentence is about


def summary(chapters: Mapping[str, Mapping[str, Any]], labelled: bool) -> list[str]:
    """A few sentences for each way to know regions."""
    said = []
    for name, chapter in chapters.items():
        said.append(f"{name}: {' '.join((*_told(chapter), *_result(chapter, labelled)))}")
    if not labelled:
        said.append(
            "Nobody in this dataset has a label, so how near samples of a group come to its people cannot be measured; regions "
            "of held-out people and left-out regions stand in for it."
        )
    return said


def _told(chapter: Mapping[str, Any]) -> list[str]:
    """What the regions can tell apart."""
    diagnosis, groups = chapter["diagnosis"], chapter["information"]
    count, rank = len(diagnosis["groups"]), diagnosis["effective_rank"]
    said = [
        f"{diagnosis['regions']} regions tell {min(rank, count)} of {count} directions between groups above their noise."
    ]
    little = [name for name, share in groups.items() if share < MOSTLY_PRIOR]
    if little:
        who = "any group" if len(little) == count else _listed(little)
        said.append(
            f"They say little of {who}: what they do not tell stays near the population's mean."
        )
    return said


def _result(chapter: Mapping[str, Any], labelled: bool) -> list[str]:
    evaluation = chapter["evaluation"]
    if labelled and evaluation["groups"]:
        found = evaluation["groups"]
        average = {label: scores["average"][HEADLINE] for label, scores in found["scores"].items()}
        closed = found["gap_closed_floor"].get(HEADLINE, {})
        said = (
            f"Samples of a group are {average['ours']:.3f} bits from held-out people of that group on where they go "
            f"(the model without groups {average['baseline']:.3f}, real training people {average['floor']:.3f})"
        )
        if closed.get("share") is None:
            return [f"{said}; {closed.get('reason', 'there was nothing to close')}."]
        share = closed["share"]
        if share <= 0:
            return [
                f"{said}: no nearer than without regions. They do not identify these groups well enough; prefer the baseline."
            ]
        return [f"{said}: {share:.0%} of the way."]
    people = evaluation.get("regional", {}).get("held_out_people")
    if people:
        better = people["supervised"] < people["baseline"]
        return [
            f"Simulated regions are {people['supervised']:.4f} bits from those of held-out people "
            f"(without groups {people['baseline']:.4f}), {'nearer' if better else 'no nearer'} than the model without groups."
        ]
    return []


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
