"""Short chat: greetings, thanks, capitals, definitions, small facts, and "I don't know" for what nobody can know."""

from __future__ import annotations

from random import Random

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, pick
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import COUNTRIES, NAMES, NOUNS, phrases, words

UNKNOWN = "I don't know."

_GREETINGS = phrases(
    "Hello|Hi|Hey|Good morning|Good evening|Hello there|Hi there|Good day|Hello!|Hi!|Hey there!|Greetings|"
    "Good afternoon"
)
_THANKS = phrases(
    "Thanks|Thank you|Thanks a lot|Thank you very much|Many thanks|Great, thanks|Thanks!|Thank you!|Perfect, thank you|"
    "That helps, thanks"
)
_FAREWELLS = phrases("Bye|Goodbye|See you|Bye!|See you later|Good night|Bye for now|Have a nice day")
_MOODS = phrases("How are you?|How are you today?|How is it going?|How do you do?|Are you well?")
_SELVES = phrases("Who are you?|What are you?|What is your name?|Are you a person?|What can you do?|Are you a machine?")

HELLO = "Hello! How can I help you?"
WELCOME = "You're welcome!"
FAREWELL = "Goodbye!"
MOOD = "I'm fine, thank you. How can I help you?"
SELF = "I'm a small language model. I can do sums, copy lists, find facts in texts and call tools."

_CAPITALS = (
    "What is the capital of {x}?",
    "Which city is the capital of {x}?",
    "Tell me the capital of {x}.",
    "Name the capital of {x}.",
    "capital of {x}?",
    "Do you know the capital of {x}?",
    "I would like to know the capital of {x}.",
    "What's the capital of {x}?",
)
_COUNTRY_OF = (
    "{x} is the capital of which country?",
    "Which country has the capital {x}?",
    "Of which country is {x} the capital?",
)
_DEFINITIONS_ASKED = (
    "What is {x}?",
    "Define {x}.",
    "Explain {x} in one sentence.",
    "What does {x} mean?",
    "Can you tell me what {x} is?",
    "Tell me what {x} is.",
)
DEFINITIONS = {
    "a verb": "A verb is a word for an action or a state.",
    "water": "Water is a clear liquid that all living things need.",
}
_FACTS = {
    "How many days are in a week?": "A week has 7 days.",
}
_UNKNOWABLE = (
    "What did {n} eat yesterday?",
    "Who will win the game tomorrow?",
    "What is the phone number of {n}?",
    "How much money does {n} have?",
    "What am I thinking of?",
    "What will the weather be next year in {x}?",
    "Which number will be drawn next week?",
    "Where did {n} put the keys?",
)
_STARTS = words("Zor Bel Kra Vun Mel Tar Quo Dra Fel Nim Lor Gry Os Ul Pra")
_ENDS = words("via land mia donia stan onia ora ith undia esia avia")


def candidate(rng: Random) -> Candidate:
    """Draw a question with its answer, sometimes after another one."""
    template, ask, reply, thought = _exchange(rng)

    def build() -> Example:
        setting = draw_setting(rng)
        turns = [Turn("user", ask)]
        if rng.random() < 0.25:
            _, other, other_reply, _ = _exchange(rng)
            turns = [Turn("user", other), Turn("assistant", other_reply), *turns]
        return Example("chat", setting.chat(turns), None, setting.answer(thought, reply), reply)

    return Candidate(f"{template}:{ask}", build)


Exchange = tuple[str, str, str, str]  # template, question, answer, thought


def _exchange(rng: Random) -> Exchange:
    kind = rng.random()
    if kind < 0.25:
        return _small_talk(rng)
    if kind < 0.5:
        return _capital(rng)
    if kind < 0.75:
        subject = pick(rng, tuple(DEFINITIONS))
        return (
            "definition",
            pick(rng, _DEFINITIONS_ASKED).format(x=subject),
            DEFINITIONS[subject],
            f"I define {subject}.",
        )
    if kind < 0.85:
        ask = pick(rng, tuple(_FACTS))
        return "fact", ask, _FACTS[ask], "This is a known fact."
    return _unknown(rng)


def _small_talk(rng: Random) -> Exchange:
    asks, reply, thought = pick(
        rng,
        (
            (_GREETINGS, HELLO, "The user greets me."),
            (_THANKS, WELCOME, "The user thanks me."),
            (_FAREWELLS, FAREWELL, "The user leaves."),
            (_MOODS, MOOD, "The user asks how I am."),
            (_SELVES, SELF, "The user asks about me."),
        ),
    )
    ask = pick(rng, asks)
    if rng.random() < 0.3:
        ask = f"{ask.rstrip('!')}, {pick(rng, NAMES)} here." if asks is _GREETINGS else ask
    return "talk", ask, reply, thought


def _capital(rng: Random) -> Exchange:
    country, capital = pick(rng, COUNTRIES)
    if rng.random() < 0.3:
        ask = pick(rng, _COUNTRY_OF).format(x=capital)
    else:
        ask = pick(rng, _CAPITALS).format(x=country)
    return "capital", ask, f"{capital} is the capital of {country}.", f"This is about {country} and {capital}."


def _unknown(rng: Random) -> Exchange:
    place = pick(rng, _STARTS) + pick(rng, _ENDS)
    kind = rng.random()
    if kind < 0.5:
        ask = pick(rng, _CAPITALS).format(x=place)
    elif kind < 0.75:
        ask = pick(rng, _DEFINITIONS_ASKED).format(x=f"a {place.lower()}{pick(rng, NOUNS)}")
    else:
        ask = pick(rng, _UNKNOWABLE).format(n=pick(rng, NAMES), x=place)
    return "unknown", ask, UNKNOWN, "I cannot know this."
