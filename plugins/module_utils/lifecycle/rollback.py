# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Going back to a plan that the hosts keep: which one, whether all hosts can, and what is done on each.

What a host keeps is its own word. It is used on that host alone; of the head's part other hosts get nothing but the order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

SUMMARIES = {"plans": [history.SUMMARY], "unreadable": [Text(longest=8192)]}
DRIFT = {
    **{part: [history.LINE] for part in ("defined", "stale", "missing_builds", "redefined", "changed_files")},
    "services": validation.Each({"state": changes.SERVICE["state"]}),
}
SHOWN = 5
UNTOUCHED = "No service was touched"
"""Ends a refusal before anything was changed."""


def record(plan: Mapping[str, Any], name: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """What a host keeps of a plan, apart from when and whether it served.

    :param contents: path on the controller → text, of files that the run copies.
    """
    host = plan["hosts"][name]
    files = [
        {
            **{key: value for key, value in file.items() if key != "source"},
            **({"content": contents[file["source"]]} if "source" in file else {}),
        }
        for file in host["files"]
    ]
    return {
        "schema": history.SCHEMA,
        "id": plan["id"],
        "cluster": plan["cluster"],
        "time": 0,
        "state": history.APPLYING,
        "name": name,
        "hosts": list(plan["hosts"]),
        "release": plan["release"],
        "model": plan["model"],
        "releases": plan["releases"],
        "host": {**host, "files": files},
        "head": plan["head"] if name == plan["head"]["host"] else None,
        "declared": release_request.declaration(plan["release"]),
        "spared": changes.spared(plan) if name == plan["head"]["host"] else None,
    }


class Target(NamedTuple):
    """The plan to go back to."""

    id: str
    release: str
    head: str
    hosts: tuple[str, ...]
    left: tuple[str, ...]
    """Hosts that answered and have no part in it: nothing is changed there."""
    away: tuple[str, ...] = ()
    """Hosts of it that do not answer, without which its head serves."""
    declared: str = ""
    """What llama_release has to be for it."""


def choose(
    cluster: str,
    heads: Collection[str],
    answers: Mapping[str, Any],
    wanted: str = "",
    failed: str = "",
    lost: Collection[str] = (),
    away: Collection[str] = (),
) -> Target:
    """The plan to go back to. Without a wish that is the plan before the one that served last, or, while a change is not finished on all hosts, the
    last one that served.

    :param heads: hosts that the inventory has as heads: a plan of which none of them has a part is some worker's invention.
    :param answers: host → what it reports of the plans that it keeps.
    :param wanted: id of a plan, or id, ref or build of a release.
    :param failed: id of the plan that was applied just now and does not serve.
    :param lost: hosts that this run lost: the others go back without them.
    :param away: hosts that did not answer at all: the others go back without them where the head of that plan serves without them.
    :raises Refusal: there is none, with what each host keeps.
    """
    answers = {
        name: validation.reported(name, "the plans that it keeps", answer, SUMMARIES)
        for name, answer in answers.items()
    }
    plans = {name: answer["plans"] for name, answer in answers.items()}
    possible, obstacles = _possible(cluster, heads, plans, lost, away)
    if wanted:
        fitting = [plan for plan in possible if _is(plan, wanted)]
        reasons = [text for plan, text in obstacles if _is(plan, wanted)]
    else:
        current = () if failed else _current(heads, plans)
        fitting = [plan for plan in possible if plan["id"] not in current]
        reasons = [text for _plan, text in obstacles]
    if failed and fitting and fitting[0]["id"] == failed:
        raise Refusal(f"plan {failed} is the last one that served here, so there is nothing to go back to")
    if not fitting:
        raise Refusal(_why_none(wanted, answers, reasons))
    target = fitting[0]
    left = tuple(sorted(set(answers) - set(target["hosts"])))
    hosts = tuple(name for name in target["hosts"] if name in answers)
    head = _heads(target["id"], heads, plans, lost)[0]
    without = tuple(name for name in target["hosts"] if name in away)
    return Target(target["id"], target["release"], head, hosts, left, without, target.get("declared") or "")


def _current(heads: Collection[str], plans: Mapping[str, list[dict[str, Any]]]) -> set[str]:
    """Ids of the plans that serve; none while a change is not finished: a plan was begun, or a host of the plan that serves has another one, as
    after it was away."""
    newest = {name: history.newest_first(own)[0] for name, own in plans.items() if own}
    serving = next((newest[name] for name in heads if name in newest), None)
    if serving is None:
        return {plan["id"] for plan in newest.values()}
    others = [plan for name, plan in newest.items() if name in serving["hosts"] and plan["id"] != serving["id"]]
    begun = any(plan["state"] == history.APPLYING for plan in newest.values())
    return set() if others or begun else {serving["id"]}


def _is(plan: Mapping[str, Any], wanted: str) -> bool:
    """Whether a plan is named so; ``pypi-0.3.36`` is also called 0.3.36."""
    names_of = (plan["id"], plan["release"], plan["release"].split("-", 1)[-1], plan["release_id"])
    return wanted in (*names_of, str(plan.get("build")))


def _heads(plan: str, heads: Collection[str], plans: Mapping[str, Any], lost: Collection[str]) -> list[str]:
    """Hosts that say that they are the head of a plan; of several the inventory's. Nobody else is believed while that one is lost."""
    claiming = [name for name, own in plans.items() if any(entry["id"] == plan and entry["head"] for entry in own)]
    return [name for name in claiming if name in heads] or ([] if set(heads).intersection(lost) else claiming)


def _possible(
    cluster: str,
    known: Collection[str],
    plans: Mapping[str, list[dict[str, Any]]],
    lost: Collection[str],
    away: Collection[str],
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], str]]]:
    """Plans that served on all of their hosts, as their heads report them, the newest first; and each other one with a sentence why not."""
    possible, obstacles = [], []
    for identity_of in dict.fromkeys(entry["id"] for own in plans.values() for entry in own):
        entries = {name: entry for name, own in plans.items() for entry in own if entry["id"] == identity_of}
        heads = _heads(identity_of, known, plans, lost)
        entry = entries[heads[0]] if heads else next(iter(entries.values()))
        why = _obstacle(cluster, entries, heads, entry, lost, away)
        if not why and not set(known).intersection(entry["hosts"]):
            why = f"has no part on {', '.join(known)}, the head of the inventory"
        if why:
            obstacles.append((entry, f"plan {identity_of} ({entry['release']}) {why}"))
        else:
            possible.append(entry)
    return [dict(entry) for entry in history.newest_first(possible)], obstacles


def _obstacle(
    cluster: str,
    entries: Mapping[str, Mapping[str, Any]],
    heads: list[str],
    entry: Mapping[str, Any],
    lost: Collection[str],
    away: Collection[str],
) -> str | None:
    foreign = [name for name, own in entries.items() if own["cluster"] != cluster]
    missing = [name for name in entry["hosts"] if name not in entries and name not in lost]
    unlike = [name for name, own in entries.items() if sorted(own["hosts"]) != sorted(entry["hosts"])]
    never = [name for name, own in entries.items() if own["state"] != history.SERVED]
    if foreign:
        return f"belongs to the cluster {validation.show(entries[foreign[0]]['cluster'])} on {', '.join(foreign)}"
    if len(heads) != 1:
        none = (
            "no head among the hosts that answered (bring it back; if it does not come back, make another host the head in the inventory, set "
            f"llama_release: {entry.get('declared') or entry['release']} and run site.yml)"
        )
        return f"has {'several heads: ' + ', '.join(heads) if heads else none}"
    if not _serves_without(entry, missing, away):
        return _why_not_without(entry, missing, away)
    if unlike or set(entries) - set(entry["hosts"]):
        others = unlike or sorted(set(entries) - set(entry["hosts"]))
        return f"names other hosts on {', '.join(others)} than on {heads[0]}"
    return f"never served on {', '.join(never)}" if never else None


def _serves_without(entry: Mapping[str, Any], missing: Collection[str], away: Collection[str]) -> bool:
    """Whether the head of a plan serves without these hosts. A fallback goes without one host of those that are used."""
    spared = entry.get("spared") or {}
    return all(name in away and name in spared for name in missing) and sum(spared[name] for name in missing) <= 1


def _why_not_without(entry: Mapping[str, Any], missing: Collection[str], away: Collection[str]) -> str:
    """Why a plan cannot serve without these hosts, and what works then."""
    silent = [name for name in missing if name in away]
    others = [name for name in missing if name not in away]
    release = entry.get("declared") or entry["release"]
    texts = [
        f"has no part on {', '.join(others)}, or the host failed above, is left out by --limit or is not in the inventory"
        * bool(others),
        f"needs {', '.join(silent)}, which does not answer, and its head serves on no fallback without that"
        * bool(silent),
    ]
    return (
        f"{', and it '.join(filter(None, texts))} (if it does not come back, remove {', '.join(missing)} from the inventory, set "
        f"llama_release: {release} and run site.yml, which plans without it and compiles nothing that is still installed)"
    )


def _why_none(wanted: str, answers: Mapping[str, Any], reasons: list[str]) -> str:
    """What was looked for, why nothing of it can be used, and what the hosts keep."""
    looked = f"No kept plan is {wanted!r}" if wanted and not reasons else "There is no plan to go back to"
    if wanted and reasons:
        looked = f"The cluster cannot go back to {wanted!r}"
    why = f": {'; '.join(reasons[:SHOWN])}" if reasons else ""
    own = [
        f"{name}: "
        + (", ".join(f"{plan['id']} ({plan['release']}, {plan['state']})" for plan in answer["plans"]) or "nothing")
        + "".join(f", {text}" for text in answer["unreadable"][:SHOWN])
        for name, answer in answers.items()
    ]
    return validation.printable(
        f"{looked}{why}. The hosts keep: {'; '.join(own) or 'nothing, since none answered'}. Name one of these with llama_rollback_to, or set "
        "llama_release and run site.yml.",
        8192,
    )


def accept(target: Mapping[str, Any], cluster: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """What is done on each host.

    :param target: a Target as a mapping.
    :param answers: host → ``record``, ``drift`` and ``missing``, as host/plan_history.py returns them, and ``place``, the host's prefix and units.
    :returns: ``plan`` with what proves that the head serves, and ``hosts``: host → ``part``, and names of services to ``stop``, to ``restart`` and to
        ``remove``.
    :raises Refusal: a host has no part that can be used, or its builds are not there any more.
    """
    lost = [name for name in target["hosts"] if name not in answers]
    if lost:
        raise Refusal(
            f"{', '.join(lost)} could not be reached or failed above, and has a part in plan {target['id']}: bring the host back and run the playbook "
            f"again. {UNTOUCHED}."
        )
    answers = {name: _checked_part(name, target, cluster, answers[name]) for name in target["hosts"]}
    gone = [
        f"{name} lacks {', '.join([*answers[name]['drift']['missing_builds'], *answers[name]['missing']])}"
        for name in target["hosts"]
        if answers[name]["drift"]["missing_builds"] or answers[name]["missing"]
    ]
    if gone:
        raise Refusal(
            f"Plan {target['id']} ({target['release']}) cannot serve any more: {'; '.join(gone)}. Put files back, choose another plan with "
            f"llama_rollback_to, or set llama_release and run site.yml, which builds again. {UNTOUCHED}."
        )
    head = answers[target["head"]]["record"]
    return {
        "plan": {
            **{key: head[key] for key in ("cluster", "model", "head")},
            "head": {"fallback_after": None, **head["head"], "host": target["head"]},
            "hosts": {target["head"]: head["host"]},
            "staging": False,
            "links": [],
            "external_workers": [],
            "fallbacks": [],
        },
        "hosts": {name: _steps(answers[name], name == target["head"]) for name in target["hosts"]},
    }


def _checked_part(name: str, target: Mapping[str, Any], cluster: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of accept, complete."""
    given: Any = answer.get("record")
    drift = answer.get("drift")
    found = (
        history.problem(given)
        or validation.problem("it", {"drift": drift, "missing": answer.get("missing")})
        or validation.mismatch("it.drift", drift, DRIFT)
        or validation.mismatch("it.missing", answer.get("missing"), [history.LINE])
    )
    if not found:
        # The part itself goes back to its host as it was: what a plan leaves out means something there.
        given = {**validation.complete(given, history.RECORD), "host": given["host"]}
        found = _unlike(name, target, cluster, given, answer["place"])
    services = [] if found else [service["name"] for service in (given or {})["host"]["services"]]
    lacking = [service for service in services if service not in (drift or {})["services"]]
    if lacking:
        found = validation.Problem(f"it.drift.services.{lacking[0]}", "is missing")
    if found:
        raise Refusal(
            f"The part of {name} in plan {target['id']} cannot be used: {found.where[3:] or 'it'} {found.why}. Choose another plan with "
            f"llama_rollback_to, or set llama_release and run site.yml. {UNTOUCHED}."
        )
    return {**answer, "record": given}


def _unlike(
    name: str, target: Mapping[str, Any], cluster: str, given: Mapping[str, Any], place: Mapping[str, Any]
) -> validation.Problem | None:
    """Why a part of the right form is not the one of this host and this plan."""
    for key, value in {"id": target["id"], "cluster": cluster, "name": name}.items():
        if given[key] != value:
            return validation.Problem(f"it.{key}", f"is {validation.show(given[key])}, not {value!r}")
    moved = [key for key, value in place.items() if given["host"][key] != value]
    if moved:
        return validation.Problem(f"it.host.{moved[0]}", "is not where the installation is now")
    return (
        None
        if bool(given["head"]) == (name == target["head"])
        else validation.Problem("it.head", "is not of this host")
    )


def _steps(answer: Mapping[str, Any], is_head: bool) -> dict[str, Any]:
    """The head stops first wherever one is defined, since it does not reconnect; of the workers those start again that do not run as kept."""
    part, drift = answer["record"]["host"], answer["drift"]
    planned = {service["name"]: service["kind"] for service in part["services"]}
    heads = [name for name, kind in planned.items() if kind == "head" and is_head]
    wrong = {name for name, service in drift["services"].items() if service["state"] not in ("running", "waiting")}
    return {
        "part": {**part, "files": [_without_source(file) for file in part["files"]]},
        "stop": sorted(name for name in drift["defined"] if name in heads or names.is_head(name)),
        "restart": sorted({*wrong, *drift["redefined"], *heads}),
        "remove": sorted(drift["stale"]),
    }


def _without_source(file: Mapping[str, Any]) -> dict[str, Any]:
    """A file of the host's word never names one of the controller. What has no content is not written, as the known-answer model."""
    known = ("path", "bytes", "sha256", "record", *(("mode", "content") if "content" in file else ()))
    return {key: file[key] for key in known if file.get(key) is not None}


def runs_other(plan: Mapping[str, Any], drifts: Mapping[str, Mapping[str, Any] | None]) -> str | None:
    """A sentence where the cluster runs another plan than the inventory's; None where it runs that one, or nobody keeps a plan.

    :param plan: completed, with ``id``.
    :param drifts: host → result of state.drift, with ``plans``; None where the host did not answer.
    """
    last = {}
    for name, drift in drifts.items():
        own = history.newest_first((drift or {}).get("plans") or [])
        if own and name in plan["hosts"] and own[0]["id"] != plan.get("id"):
            last[name] = own[0]
    if not last:
        return None
    name = plan["head"]["host"] if plan["head"]["host"] in last else sorted(last)[0]
    state = "serves" if last[name]["state"] == history.SERVED else "was begun and never served"
    text = (
        f"The inventory plans release {plan['release']['ref']} (plan {plan.get('id')}), but on {', '.join(sorted(last))} plan {last[name]['id']} with release "
        f"{last[name]['release']} {state}: site.yml goes to what the inventory says. To stay, set llama_release: "
        f"{last[name].get('declared') or last[name]['release']}"
    )
    return validation.printable(text) + "."


class Failure(NamedTuple):
    """How a change ended that did not serve."""

    plan: str
    release: str
    reasons: Mapping[str, str]
    """Host → what failed there."""
    lost: Collection[str]
    back: Mapping[str, Any] | None
    """Target to which the cluster went back, and which serves; None where it did not."""
    why_not: str


def _reasons(reasons: Mapping[str, str], lost: Collection[str]) -> str:
    """What failed where; the same text of several hosts is said once."""
    hosts: dict[str, list[str]] = {}
    for name, text in reasons.items():
        hosts.setdefault(_lines(text), []).append(name)
    said = [f"{', '.join(named)}: {text}" for text, named in hosts.items()]
    gone = [f"{', '.join(sorted(lost))} was lost in the middle"] if lost else []
    return "; ".join([*gone, *said]) or "see the errors above"


def sentence(failure: Failure) -> str:
    """What failed, whether the old release serves again, and what to do. The reasons may end in lines of logs."""
    lost = ", ".join(sorted(failure.lost))
    reasons = _reasons(failure.reasons, failure.lost)
    texts = [f"Plan {failure.plan} (release {failure.release}) does not serve: {reasons}."]
    if failure.back:
        texts.append(
            f"The cluster went back by itself: plan {failure.back['id']} (release {failure.back['release']}) serves again. Fix what failed and run site.yml "
            "again, or set the inventory back to that release. rollback.yml would go back one more plan."
        )
    else:
        texts.append(
            f"The old release does NOT serve again: {_lines(failure.why_not) or 'see the errors above'}. Fix what failed and run site.yml again for the new "
            "release, or run rollback.yml for the old one."
        )
    if lost:
        texts.append(
            f"When {lost} answers again, run {'rollback.yml' if failure.back else 'rollback.yml or site.yml'}: it may have the other release until then."
        )
    return "\n".join(texts)


def unfinished(target: Mapping[str, Any], reasons: Mapping[str, str], lost: Collection[str]) -> str:
    """Why a rollback did not end, and what to do.

    :param target: empty where none was chosen.
    """
    said = _reasons(reasons, lost)
    if not target or UNTOUCHED in said:
        return f"The cluster did not go back: {said}."
    after = f"When {', '.join(sorted(lost))} answers again" if lost else "Fix that"
    return (
        f"The cluster did not go back to plan {target['id']} (release {target['release']}): {said}.\n{after}"
        f"{', run' if lost else ' and run'} rollback.yml again with -e llama_rollback_to={target['id']}: it goes on where it stopped."
    )


def returned(target: Mapping[str, Any], release: str, check: bool = False) -> str:
    """What serves after a rollback, and what the next run of site.yml would do.

    :param release: llama_release of the inventory as JSON; empty text where it is not given.
    """
    named = f"has llama_release: {release}" if release not in ("", '""') else "has no llama_release"
    left = (
        f" {', '.join(target['left'])} had no part in that plan, and nothing was changed there."
        if target["left"]
        else ""
    )
    serves = "would serve" if check else "serves"
    gone = ", ".join(target.get("away") or ())
    away = (
        f" {gone} does not answer: the head serves without it, after a wait for it where it is used. When it answers again, run rollback.yml with "
        f"-e llama_rollback_to={target['id']}: it may have another release until then."
        if gone
        else ""
    )
    return validation.printable(
        f"Plan {target['id']} with release {target['release']} {serves}. The inventory {named}, and the next site.yml goes to what the inventory says. "
        f"To stay here, set llama_release: {target.get('declared') or target['release']}. rollback.yml without llama_rollback_to would go to the plan before "
        f"this.{left}{away}",
        8192,
    )


def _lines(text: str) -> str:
    return "\n".join(validation.printable(line) for line in str(text).splitlines()).rstrip(".\n ")
