"""Draws how a conversation is held: thinking, effort, system prompt."""

from __future__ import annotations

from random import Random

from dsparkd.text.encoding import Effort
from tools.train_nano.tasks.example import Setting, pick

EFFORTS: tuple[Effort, ...] = ("low",) * 8 + ("high", "max")
SYSTEM_SHARE = 0.35

# None of these changes what the answer is: a system prompt is no reason to fail.
_ROLES = (
    "You are a helpful assistant.",
    "You are a careful assistant.",
    "You are a friendly assistant.",
    "You are an assistant in a small office.",
    "You are the assistant of a warehouse.",
    "You are a school assistant.",
    "You are a reliable clerk.",
    "You help people with short questions.",
    "You answer questions for customers.",
    "You work for a library.",
    "You are a support agent.",
    "You are a patient teacher.",
    "Assistant for internal use.",
    "Your name is Nano.",
)
_MANNERS = (
    "Be brief.",
    "Be exact.",
    "Be polite.",
    "Answer in English.",
    "Answer carefully.",
    "Keep answers short.",
    "Do not add anything.",
    "Follow the instructions exactly.",
    "Never guess.",
    "Give only what was asked for.",
    "Read the whole message first.",
    "Stay on topic.",
    "Use plain words.",
    "Check your work.",
)


def draw_setting(rng: Random) -> Setting:
    """Draw thinking for half of all conversations, and a system prompt for about a third."""
    thinking = rng.random() < 0.5
    effort = pick(rng, EFFORTS) if thinking else None
    return Setting(thinking, effort, _system(rng) if rng.random() < SYSTEM_SHARE else None)


def _system(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return pick(rng, _ROLES)
    if kind < 0.7:
        return pick(rng, _MANNERS)
    return f"{pick(rng, _ROLES)} {pick(rng, _MANNERS)}"
