# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prompts of a proof, and the distance between the answers of a device and those of the head's processor.

Two correct programs round differently: a device may quantise activations, and adds numbers in another order. How much that changes the answers depends on
the model, so the bound comes from the distances between several correct ways in which the processor computes. Prompts consist of fixed tokens, alternately
plain text and random, so that all sides compute the same. docs/operating.md shows the distances that were measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHORT_LENGTHS = {
    "prompts of 2 to 8 tokens": (2, 3, 4, 5, 6, 7, 8),
    "prompts of 9 to 64 tokens": (9, 16, 17, 31, 32, 33, 48, 64),
    "prompts of 65 to 513 tokens": (65, 96, 128, 129, 192, 256, 257, 513),
}
"""Lengths of prompts in each group, chosen around the lengths at which devices switch between kernels."""
MAX_SHORT_LENGTH = 513
MAX_VARIANT_LENGTH = 257
"""Length of the longest prompt that variants of the processor answer."""
LONG_LENGTHS = (1025, *range(1026, 1034), 1100, 1300, 2049, 2100, 3000, 4097, *range(4098, 4110), 4200)
"""Lengths at which a growing long prompt is sent. A step of 1 adds a single token."""
CONTEXT_TOKENS = 4352
"""Number of tokens of the longest prompt and its answer, in blocks of 256."""
LISTED_TOKEN_COUNT, COMPARED_TOKENS = 64, 32
"""Number of likeliest tokens that a side lists, and number of the processor's tokens to look up among them."""
MIN_LOGPROB = -80.0
"""Logarithm below which a single-precision probability cannot be distinguished from zero."""
BOUND_FACTOR, MIN_GROUP_BOUND, MIN_POSITION_BOUND = 3.0, 0.05, 0.25
"""Bound as a multiple of the processor's own largest distance, and smallest bounds for a group and for its third worst position. The H200's correct
kernels reach 0.041 and 0.09 on noise that the processor's variants compute alike."""
Answer = Mapping[int, float]
"""Likeliest tokens and the logarithms of their probabilities, the likeliest first; empty if the logarithms are not numbers."""


class Question(NamedTuple):
    """A prompt, after which the likeliest tokens are listed."""

    group: str
    length: int
    start: int
    """position of its first token"""
    is_text: bool
    """whether it is plain text"""
    continues: bool = False
    """whether it continues the previous prompt"""


class Tokens(NamedTuple):
    """Tokens of which prompts consist."""

    prefix: tuple[int, ...]
    """tokens that the model expects at the beginning of a text"""
    text: tuple[int, ...]
    random: tuple[int, ...]

    def prompt(self, question: Question) -> list[int]:
        tokens = itertools.cycle(self.text if question.is_text else self.random)
        body = itertools.islice(tokens, question.start, question.start + question.length)
        return [*self.prefix, *body][: question.length]


class Bounds(NamedTuple):
    """Largest distances of a device that computes correctly."""

    group: float = MIN_GROUP_BOUND
    """for three of four positions of a group"""
    position: float = MIN_POSITION_BOUND
    """for the third worst position of a group"""


class Distance(NamedTuple):
    """Largest distance of a device from the processor, relative to the bound."""

    value: float
    bound: float
    prompt_kind: str
    """readable name of the group"""


def list_questions(context_tokens: int) -> list[Question]:
    """Return the questions that fit into a context."""
    questions: list[Question] = []
    for group, lengths in SHORT_LENGTHS.items():
        questions += [Question(group, length, 37 * index, index % 2 == 0) for index, length in enumerate(lengths)]
    for last_length, length in zip((0, *LONG_LENGTHS), LONG_LENGTHS):
        kind = "single tokens" if length == last_length + 1 else "prompts"
        questions.append(
            Question(f"{kind} beyond {1024 if length < 4096 else 4096} tokens", length, 0, True, bool(last_length))
        )
    return [question for question in questions if question.length < context_tokens]


def count_tokens(questions: Iterable[Question]) -> int:
    """Return the number of tokens that a side computes."""
    count = previous_length = 0
    for question in questions:
        count += question.length - (previous_length if question.continues else 0)
        previous_length = question.length
    return count


def count_pairs(questions: Iterable[Question]) -> int:
    """Return the number of pairs of tokens for which a side computes attention."""
    count = previous_length = 0
    for question in questions:
        start = previous_length if question.continues else 0
        count += (question.length**2 - start**2) // 2
        previous_length = question.length
    return count


def variant_questions(questions: Iterable[Question]) -> list[Question]:
    """Return the questions that variants of the processor answer."""
    return [question for question in questions if question.length <= MAX_VARIANT_LENGTH]


def random_tokens(vocabulary_size: int) -> tuple[int, ...]:
    """Return random tokens, excluding the ends of a vocabulary, where many tokens are not words."""
    generator = random.Random(45)
    first_token, end_token = vocabulary_size // 4, max(vocabulary_size // 4 + 1, vocabulary_size * 7 // 8)
    return tuple(generator.randrange(first_token, end_token) for _index in range(1024))


def parse_answer(reply: Any) -> Answer:
    """Return the answer in llama-server's reply.

    :raises ValueError, TypeError, KeyError, IndexError: the reply is invalid.
    """
    tokens = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"][:LISTED_TOKEN_COUNT]
    entries = itertools.takewhile(lambda token: token["logprob"] is not None and token["logprob"] > MIN_LOGPROB, tokens)
    return {int(token["id"]): float(token["logprob"]) for token in entries}


def answer_distance(reference: Answer, answer: Answer) -> float:
    """Return the mean difference of the processor's likeliest tokens, relative to the range of their logarithms. A token that is not listed counts as 1.

    :param reference: the processor's answer.
    """
    top_tokens = [*reference.items()][:COMPARED_TOKENS]
    log_range = top_tokens[0][1] - top_tokens[-1][1] or 1.0
    differences = [
        min(1.0, abs(answer[token] - logprob) / log_range) if token in answer else 1.0 for token, logprob in top_tokens
    ]
    return sum(differences) / len(differences)


def distances(
    questions: Sequence[Question], reference: Sequence[Answer], answers: Sequence[Answer]
) -> dict[str, list[float]]:
    """Return the distances at the positions of each group, in ascending order."""
    distances_by_group: dict[str, list[float]] = {}
    for question, reference_answer, answer in zip(questions, reference, answers):
        distances_by_group.setdefault(question.group, []).append(answer_distance(reference_answer, answer))
    return {group: sorted(values) for group, values in distances_by_group.items()}


def lower_quartile(values: Sequence[float]) -> float:
    """Return the distance that three quarters of the positions reach.

    :param values: distances in ascending order.
    """
    return values[len(values) // 4]


def third_largest(values: Sequence[float]) -> float:
    """Return the distance that three positions reach, or all if there are fewer: at up to two, a correct device may choose other experts.

    :param values: in ascending order.
    """
    return values[-min(3, len(values))]


def bounds(questions: Sequence[Question], reference: Sequence[Answer], variants: Iterable[Sequence[Answer]]) -> Bounds:
    """Return the bounds derived from the processor's own variants.

    :param variants: each variant's answers to the first questions.
    """
    distance_lists = [values for variant in variants for values in distances(questions, reference, variant).values()]
    return Bounds(
        max([MIN_GROUP_BOUND, *(BOUND_FACTOR * lower_quartile(values) for values in distance_lists)]),
        max([MIN_POSITION_BOUND, *(BOUND_FACTOR * third_largest(values) for values in distance_lists)]),
    )


def worst_distance(groups: Mapping[str, Sequence[float]], bounds: Bounds) -> Distance:
    """Return the largest distance relative to its bound."""
    candidates = [Distance(lower_quartile(values), bounds.group, group) for group, values in groups.items()]
    candidates += [
        Distance(third_largest(values), bounds.position, f"some of the {group}") for group, values in groups.items()
    ]
    return max(candidates, key=lambda candidate: candidate.value / candidate.bound)
